"""The first failure of a run: the supervisor's verdict, or the rank that failed first. Pure."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tridock.contracts.events import Cause, Event
from tridock.contracts.records import record_of
from tridock.errors import Problem, count

_LENGTH = 300
# The supervisor's verdicts; without any, the message of a node that lost contact with the supervisor.
_SEEN = (
    *(Event.NODE_FAILED, Event.RANK_DIED, Event.RANK_HUNG, Event.NODE_LOST),
    *(Event.HEAD_LOST, Event.LAUNCHER_ENDED),
)


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """A rank, its node and the first line of its message; ``agreed``: every rank would have had the same message.

    ``seen``: the supervisor's observation instead of a message; without a rank, of its node or of the launcher.
    """

    rank: int | None
    node: str
    reason: str
    agreed: bool = False
    seen: bool = False
    event: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The record in ``events.jsonl``; for a rank that ended without a message, that of another rank that lost it."""

    @property
    def problem(self) -> Problem | None:
        recorded = self.event.get("problem")
        return Problem.of(recorded) if recorded else None

    def __str__(self) -> str:
        if self.seen:
            return f"{self.node if self.rank is None else f'rank {self.rank} on {self.node}'} {self.reason}"
        return f"{'every rank' if self.agreed else f'rank {self.rank} on {self.node} first'}: {self.reason}"


def first_failure(events: Mapping[str, str], nodes: Mapping[int, str]) -> FirstFailure | None:
    """Parses each node's part of ``events.jsonl``; ``nodes`` maps all ranks to their nodes.

    Nodes may share the file. Their clocks may differ: by as much as is on record, times are corrected, and a rank that
    failed by itself precedes any that lost another rank or was asked to end, regardless of the time. If all only lost
    another rank, a rank without a message failed first.
    """
    attempt = _last_attempt(events.values())
    if found := sorted((event for event in attempt if event["event"] in _SEEN), key=_weight):
        seen = found[0]
        node = str(seen.get("node") or "the launcher")
        return FirstFailure(seen.get("rank"), node, str(seen.get("reason"))[:_LENGTH], seen=True, event=seen)
    of_ranks = (event for event in attempt if event["event"] == Event.RUN_FAILED and "rank" in event)
    failures = {json.dumps(event, sort_keys=True): event for event in of_ranks}
    if not failures:
        return None
    clocks = _clocks(attempt)

    def order(event: Mapping[str, Any]) -> tuple[bool, str]:
        return bool(event.get("consequence")), _moment(event, clocks.get(nodes.get(int(event["rank"]), ""), 0.0))

    first = min(failures.values(), key=order)
    spoke = {int(event["rank"]) for event in failures.values()}
    silent = [rank for rank in nodes if rank not in spoke]
    if first.get("consequence") and silent:
        return FirstFailure(silent[0], nodes[silent[0]], _others_without_reason(silent[1:]), event=first)
    rank = int(first["rank"])
    node = nodes.get(rank, "an unknown node")
    return FirstFailure(rank, node, _essence(first), bool(first.get("agreed")), event=first)


def memory_kills(events: Mapping[str, str]) -> dict[str, int]:
    """Returns how many processes the kernel killed for memory on each node in the last attempt, by its counter."""
    found = (event for event in _last_attempt(events.values()) if event["event"] == Event.MEMORY_KILLS)
    counts = ((str(event.get("node")), event.get("processes")) for event in found)
    return {node: count for node, count in counts if isinstance(count, int) and count > 0}


def evidence_beside(events: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the evidence beside the last attempt's failure: links that went down, clocks that differ."""
    found = _last_attempt(events.values())
    downs = ((event, event.get("downs")) for event in found if event["event"] == Event.LINK_FAULTS)
    links = (
        f"{event.get('link')} of {event.get('node')} went down {count(number, 'time')}"
        for event, number in downs
        if isinstance(number, int) and number > 0
    )
    clocks = (
        f"the clock of {node} is {abs(seconds):g} s {'ahead of' if seconds > 0 else 'behind'} the head's"
        for node, seconds in _clocks(found).items()
    )
    return tuple(dict.fromkeys((*links, *clocks)))


def _clocks(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns by how many seconds each node's clock was ahead of the head's, by the supervisor's record."""
    found = ((str(it.get("node")), it.get("seconds")) for it in events if it["event"] == Event.CLOCK_DIFFERS)
    return {node: float(seconds) for node, seconds in found if isinstance(seconds, int | float)}


def _moment(event: Mapping[str, Any], ahead_s: float) -> str:
    """Returns when an event was, by the head's clock; ``ahead_s`` is by how much that of its node is ahead."""
    time = str(event.get("time"))
    try:
        return (datetime.fromisoformat(time) - timedelta(seconds=ahead_s)).isoformat() if ahead_s else time
    except (ValueError, OverflowError):
        return time


def _others_without_reason(others: Sequence[int]) -> str:
    """Returns the reason for ranks that the others lost: a signal ended them, from the kernel if memory ran out."""
    too = f", as did {', '.join(str(rank) for rank in others)}" if others else ""
    return f"ended without a message{too} (killed by a signal, perhaps because memory ran out: see dmesg there)"


def _essence(event: Mapping[str, Any]) -> str:
    """Returns the first line of a reason; of a Tridock error, what is wrong. The log has the rest."""
    lines = str(event.get("reason") or "").strip().splitlines() or ["no reason on record"]
    problem = event.get("problem")
    return (f"{problem['where']}: {problem['what']}" if problem else lines[0])[:_LENGTH]


def _weight(event: Mapping[str, Any]) -> int:
    """Ranks events by how much they explain: a lost node, then the ranks that lost it, then one that was asked to end,
    then a program that failed, then a node that ended its ranks without the head, then the launcher.

    A program that could not start explains the ranks that it lacks.
    """
    if event.get("cause") == Cause.PROGRAM_FAILED:
        return 2
    if event.get("cause") == Cause.RANK_SIGNALLED and "SIGTERM" in str(event.get("reason")):
        return 1
    return {Event.NODE_LOST: -1, Event.HEAD_LOST: 3, Event.LAUNCHER_ENDED: 4}.get(Event(event["event"]), 0)


def _last_attempt(files: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the events since the run's last start, by the clock: only the head's file records the start."""
    events = [event for content in files for event in _events(content)]
    restarts = [str(event.get("time")) for event in events if event["event"] == Event.RUN_RESTARTED]
    return [event for event in events if not restarts or str(event.get("time")) > max(restarts)]


def _events(content: str) -> Iterator[dict[str, Any]]:
    for line in content.split("\n"):
        # The last line of a node that died during the write is none.
        if (event := record_of(line)) is not None and "event" in event:
            yield event
