"""The verdict on a run, from the status of its ranks and nodes. Pure."""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tridock.contracts import heartbeat
from tridock.contracts.events import Cause
from tridock.contracts.hang_limits import LEARNT_STEPS, LIMITS, limit_s
from tridock.contracts.rank_status import NODE_SILENCE_S, RankStatus
from tridock.errors import RequestError, RunError, count

LOST_S: Final = 5.0
"""Seconds for a lost rank's node to report the rank's end."""

_SEEN_LATE_S: Final = 0.5
"""Seconds: what watches a rank of your own program may see its end this late on a busy machine, and a launcher ends the
others with SIGTERM a tenth of a second after the first."""

_ASKED: Final = (signal.SIGTERM, (128 + signal.SIGTERM) << 8, None)
"""Ends of a rank that may have been asked to: the last one is not known."""

_STOPPED_S: Final = 1.0
"""Seconds; a sampling debugger stops a process for less."""

# 255 is ssh's own exit code; any other is the remote command's.
LOGIN_REFUSED: Final = re.compile(r"Permission denied \([^)]*\)|Host key verification failed")
"""ssh's own words for keys that do not match."""
_LOST_SESSION: Final = re.compile(rb"^pdsh@\S+: (\S+): ssh exited with exit code 255$", re.MULTILINE)
_WAITING: Final = ("/torch/distributed/", "/torch/autograd/", "/torch/cuda/", "/torch/_tensor.py", "/deepspeed/")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a run is over: its cause code, the node and rank at fault, and the exit code of the run.

    ``reason`` is a sentence without its subject: ``was ended by SIGKILL``.
    """

    cause: Cause
    reason: str
    node: str | None = None
    rank: int | None = None
    code: int = RunError.exit_code
    asked_to_end: bool = False
    """Whether SIGTERM ended the rank, which a launcher sends after losing another node."""
    path: str | None = None
    """The file on the node that is the reason."""
    wait_status: int | None = field(default=None, compare=False)
    """How the process of the rank ended, as in wait(2), if that is the reason."""

    def __str__(self) -> str:
        who = f"rank {self.rank} on {self.node}" if self.rank is not None else self.node or "the launcher"
        return f"{who} {self.reason}"


def recorded(event: Mapping[str, Any], code: int = RunError.exit_code) -> Verdict:
    """Returns the verdict that a node's launcher or agent has recorded."""
    return Verdict(Cause(event["cause"]), event["reason"], event["node"], code=code)


StatusByNode = Mapping[str, Sequence[RankStatus]]
"""The status of the ranks, by node."""


def each(statuses_by_node: StatusByNode) -> Iterator[tuple[str, RankStatus]]:
    """Yields the ranks of all nodes, each with its node."""
    return ((node, status) for node, statuses in statuses_by_node.items() for status in statuses)


def first_death(statuses_by_node: StatusByNode) -> Verdict | None:
    """Returns the rank that died or failed first; None while all live or have ended with success.

    Ranks that only lost a peer do not count until the peer's end is seen: its node may report it later.
    """
    found = [(_since(status), node, status) for node, status in each(statuses_by_node) if _has_failed(status)]
    if not found:
        return None
    since, node, status = max(found, key=lambda entry: (entry[0], -entry[2].rank))
    if status.wait_status == signal.SIGTERM:
        if (first := first_gone(statuses_by_node, since)) is not None:
            return first
        itself = [it for it in found if it[2].wait_status not in _ASKED and it[0] > since - _SEEN_LATE_S]
        if status.phase == heartbeat.OBSERVED and itself:
            _, node, status = max(itself, key=lambda entry: (entry[0], -entry[2].rank))
    if status.phase == heartbeat.FAILED:
        return Verdict(Cause.RANK_FAILED, "failed", node, status.rank, status.code or RunError.exit_code)
    asked_to_end = status.wait_status == signal.SIGTERM
    return Verdict(*ending(status), node, status.rank, asked_to_end=asked_to_end, wait_status=status.wait_status)


def first_gone(statuses_by_node: StatusByNode, since: float = 0.0, code: int = RunError.exit_code) -> Verdict | None:
    """Returns the first rank that ended more than ``since`` seconds ago, if only its launcher saw how.

    Used for a launcher that then ended the others with SIGTERM, or that itself failed with ``code``.
    """
    gone = [
        (status.gone_s, -status.rank, node)
        for node, status in each(statuses_by_node)
        if status.phase == heartbeat.GONE and status.gone_s > since
    ]
    if not gone:
        return None
    _, rank, node = max(gone)
    return Verdict(Cause.RANK_GONE, "was the first to end, and its launcher reports an error", node, -rank, code)


def _has_failed(status: RankStatus) -> bool:
    if status.phase in (heartbeat.END, heartbeat.LOST, heartbeat.GONE):
        return False
    return status.phase == heartbeat.FAILED or not status.alive


def _since(status: RankStatus) -> float:
    return status.age_s if status.phase == heartbeat.FAILED else status.gone_s


def ending(status: RankStatus) -> tuple[Cause, str]:
    """Returns why a dead rank ended, as a code and as a sentence without its subject."""
    after = f" after iteration {status.iteration}" if status.iteration else " before its first step"
    if status.phase == heartbeat.OBSERVED:
        after = ""
    if status.wait_status is None:
        cause, how = Cause.RANK_VANISHED, "ended without a message"
    elif number := status.wait_status & 0x7F:
        cause, how = Cause.RANK_SIGNALLED, f"was ended by {signal_name(number)}"
        if number == signal.SIGKILL and status.killed_for_memory:
            cause, how = Cause.RANK_KILLED_FOR_MEMORY, "was killed by the kernel, out of memory"
    else:
        cause, how = Cause.RANK_EXITED, f"exited with code {status.wait_status >> 8}"
    return cause, f"{how}{after}"


def signal_name(number: int) -> str:
    """Returns a signal's name, such as ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def separate_worlds(
    statuses_by_node: StatusByNode, ranks: Mapping[str, Sequence[int]], *, per_slot: bool
) -> Verdict | None:
    """Returns that your own program trains on each node, or in each slot, without the others: it starts ranks itself,
    and does not know of the other nodes. ``ranks``: those of the run, by node.
    """
    for node, status in each(statuses_by_node) if per_slot else ():
        if status.alive and (size := status.inner_world_size):
            how = f"runs the program once per slot, and each starts ranks itself, in a world of {size}"
            return Verdict(Cause.SEPARATE_WORLDS, how, node, code=RequestError.exit_code)
    sizes = {name: status.world_size for name, status in each(statuses_by_node) if status.alive and status.rank == 0}
    node = next(iter(ranks))
    if len(ranks) > 1 and all(0 < sizes.get(node, 0) <= len(numbers) for node, numbers in ranks.items()):
        how = f"has a rank 0 in a world of {sizes[node]}, as have all {len(ranks)} nodes: each trains alone"
        return Verdict(Cause.SEPARATE_WORLDS, how, node, code=RequestError.exit_code)
    return None


def rank_without_peer(statuses_by_node: StatusByNode) -> Verdict | None:
    """Returns a rank that has lost a peer, although no rank is seen to have died."""
    found = [(node, it) for node, it in each(statuses_by_node) if it.phase == heartbeat.LOST and it.age_s > LOST_S]
    if not found:
        return None
    node, status = max(found, key=lambda entry: entry[1].age_s)
    return Verdict(Cause.RANK_FAILED, "lost another rank", node, status.rank, status.code or RunError.exit_code)


def lost_node(silence_s: Mapping[str, float], ssh_errors: Mapping[str, str]) -> Verdict | None:
    """Returns the node silent for longest, if too long; ``ssh_errors`` has the last line of each ssh."""
    overdue = [(seconds, node) for node, seconds in silence_s.items() if seconds >= NODE_SILENCE_S]
    if not overdue:
        return None
    seconds, node = max(overdue, key=lambda entry: entry[0])
    error = f" ({ssh_errors[node]})" if ssh_errors.get(node) else ""
    more = ", ".join(name for _, name in overdue if name != node)
    others = f", as has {more}" if more else ""
    return Verdict(Cause.NODE_SILENT, f"has not answered for {seconds:.0f} s{error}{others}", node)


def lost_session(log: bytes) -> Verdict | None:
    """Returns the node whose ssh session a launcher lost, by pdsh's message in its log."""
    found = _LOST_SESSION.search(log)
    if found is None:
        return None
    node = found[1].decode()
    said = [
        line.partition(": ")[2] for line in log.decode(errors="replace").splitlines() if line.startswith(f"{node}: ")
    ]
    if refused := [line for line in said if LOGIN_REFUSED.search(line)]:
        return Verdict(Cause.LOGIN_REFUSED, login_refused(refused[-1]), node)
    return Verdict(Cause.SSH_SESSION_LOST, "dropped the ssh session in which its ranks were started", node)


def refused_node(ssh_errors: Mapping[str, str]) -> Verdict | None:
    """Returns a node that does not let the head's own ssh in."""
    found = ((node, line) for node, line in ssh_errors.items() if LOGIN_REFUSED.search(line))
    return next((Verdict(Cause.LOGIN_REFUSED, login_refused(line), node) for node, line in found), None)


def login_refused(line: str) -> str:
    """Returns why a node's ranks cannot be started, from ssh's line."""
    return f"does not let the head in: {line.strip()}"


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The limits of a run's ranks: ``hang_s`` is ``launch.hang_timeout``, ``planned_step_s`` the plan's estimate."""

    hang_s: float
    planned_step_s: float | None = None

    def of(self, status: RankStatus) -> float:
        """Returns the seconds without progress after which the rank counts as hung."""
        return limit_s(
            status.phase,
            self.hang_s,
            steps=status.steps,
            longest_step_s=status.longest_step_s,
            planned_step_s=self.planned_step_s,
        )


def longest_step_s(statuses_by_node: StatusByNode) -> float:
    """Returns the longest step of the ranks that have learnt how long theirs take; 0 before."""
    return max((it.longest_step_s for _, it in each(statuses_by_node) if it.steps >= LEARNT_STEPS), default=0.0)


def overdue_ranks(statuses_by_node: StatusByNode, limits: HangLimits) -> list[tuple[str, RankStatus]]:
    """Returns the live ranks without progress; none if ``launch.hang_timeout`` is 0.

    While ranks start or save, one that reads or writes is progress for all in its phase: they wait for it.
    """
    if not limits.hang_s:
        return []
    living = [(node, status) for node, status in each(statuses_by_node) if status.alive]
    least: dict[str, float] = {}
    for _, status in living:
        if (limit := LIMITS.get(status.phase)) is not None and limit.counts_bytes:
            least[status.phase] = min(status.age_s, least.get(status.phase, status.age_s))
    return [
        (node, status)
        for node, status in living
        if least.get(status.phase, status.age_s) > limits.of(status) or status.stopped_s > limits.hang_s
    ]


def hung(
    statuses_by_node: StatusByNode,
    overdue: Sequence[tuple[str, RankStatus]],
    stacks: Mapping[int, Sequence[str]],
    limits: HangLimits,
) -> Verdict:
    """Returns the verdict on the rank that holds up the ``overdue`` ones.

    It is a stopped rank, or else one that is behind, or else one that does not wait in a collective. ``stacks`` are the
    frames of each rank's main thread as ``file:line in function``, the innermost first. Of a program without
    heartbeats its silence is known, and where it is silent if its stacks are.
    """
    living = [(node, status) for node, status in each(statuses_by_node) if status.alive]
    stopped = [entry for entry in living if entry[1].stopped_s >= _STOPPED_S]
    if not stopped and all(status.phase == heartbeat.OBSERVED for _, status in overdue):
        return _silent(living, overdue, stacks, limits)
    least = min(status.heartbeats for _, status in living)
    behind = [entry for entry in living if entry[1].heartbeats == least]
    odd = _odd_ones(behind, stacks)
    if stopped:
        (node, status), cause, how = stopped[0], Cause.RANK_STOPPED, "is stopped (SIGSTOP, or a debugger)"
    elif len(living) == 1:
        (node, status), cause, how = living[0], Cause.RANK_HUNG, "hangs"
    elif len(odd or behind) < len(living):
        (node, status), cause, how = (odd or behind)[0], Cause.RANK_HUNG, "hangs while others wait for it"
    else:
        how = f"hangs, as do all {len(living)} ranks: a collective that does not end"
        (node, status), cause = behind[0], Cause.COLLECTIVE_HUNG
    place = f" at {stacks[status.rank][0]}" if stacks.get(status.rank) and not stopped else ""
    waited, late = max(((status.age_s, status) for _, status in overdue), key=lambda entry: entry[0])
    if status.phase == heartbeat.OBSERVED:
        return Verdict(cause, f"{how}{place}; no output and no processor time for {waited:.0f} s", node, status.rank)
    limit = limits.hang_s if stopped else limits.of(late)
    after = f"phase {status.phase} after iteration {status.iteration}"
    return Verdict(
        cause, f"{how}{place}; no progress for {waited:.0f} s (limit {limit:.0f} s), {after}", node, status.rank
    )


def _silent(
    living: Sequence[tuple[str, RankStatus]],
    overdue: Sequence[tuple[str, RankStatus]],
    stacks: Mapping[int, Sequence[str]],
    limits: HangLimits,
) -> Verdict:
    """Returns that a program without heartbeats is silent: the rank that its stack shows outside of a collective while
    others wait in one, or else the one that is silent for longest. Those that wait may not be silent for as long.
    """
    odd = [entry for entry in _odd_ones(living, stacks) if entry in overdue]
    node, status = max(odd or overdue, key=lambda entry: entry[1].age_s)
    place = f" at {stacks[status.rank][0]}" if stacks.get(status.rank) else ""
    others = f", as well as {count(len(overdue) - 1, 'other rank')}" if len(overdue) > 1 else ""
    others = " while others wait in a collective" if odd else others
    silence = f"no output and no processor time for {status.age_s:.0f} s (limit {limits.hang_s:.0f} s)"
    return Verdict(Cause.PROGRAM_SILENT, f"is silent{place}{others}: {silence}", node, status.rank)


def build_locked(statuses_by_node: StatusByNode, locks: Mapping[int, str]) -> Verdict | None:
    """Returns the first living rank that waits for a lock of torch's extension builder; ``locks``: paths by rank."""
    for node, status in each(statuses_by_node):
        if status.alive and (path := locks.get(status.rank)) is not None:
            how = f"waits for {path}, a lock of torch's extension builder that no process there holds"
            return Verdict(Cause.BUILD_LOCKED, how, node, status.rank, path=path)
    return None


def _odd_ones(
    ranks: Sequence[tuple[str, RankStatus]], stacks: Mapping[int, Sequence[str]]
) -> list[tuple[str, RankStatus]]:
    """Returns the ranks that do not wait, or none if no rank is seen to wait, because that identifies nobody."""
    seen = [entry for entry in ranks if stacks.get(entry[1].rank)]
    found = [entry for entry in seen if not waits(stacks[entry[1].rank])]
    return found if len(found) < len(seen) else []


def waits(frames: Sequence[str]) -> bool:
    """Whether a main thread is in a function that calls collectives, or where autograd and CUDA wait for them."""
    return any(mark in frames[0] for mark in _WAITING)
