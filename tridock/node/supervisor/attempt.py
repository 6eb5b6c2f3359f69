"""One attempt of a run: what its nodes report until it ends, why it ended, and what is recorded of that."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, process_records, run_folder
from tridock.contracts.appends import append
from tridock.contracts.events import Cause, Event, append_event, event_count, events_of
from tridock.contracts.hang_limits import STEPS, learnt_s
from tridock.contracts.lease import HeldLease
from tridock.contracts.run_state import mark_stopped
from tridock.contracts.supervision import Supervision
from tridock.errors import RequestError, RunError
from tridock.node.agent.processes import find_processes
from tridock.node.supervisor.agent_connections import AgentConnections
from tridock.node.supervisor.disks import Disks
from tridock.node.supervisor.launcher_process import LauncherProcess, ProgramPreemption
from tridock.node.supervisor.rank_records import Iterations, PrintedMetrics, RankTable
from tridock.node.supervisor.verdict import (
    HangLimits,
    StatusByNode,
    Verdict,
    build_locked,
    each,
    first_death,
    first_gone,
    hung,
    longest_step_s,
    lost_node,
    overdue_ranks,
    rank_without_peer,
    recorded,
    refused_node,
    separate_worlds,
)

_TICK_S: Final = 0.1
_OWN_END_S: Final = 3.0
"""Seconds for the other ranks and the launcher to report why they end, after the first failure."""
TERM_S: Final = 2.5
"""Seconds between SIGTERM and SIGKILL."""
STOP_PATIENCE_S: Final = 6.0
_STOPPED_PATIENCE_S: Final = 20.0
_STACKS_PATIENCE_S: Final = 10.0
_CLOCK_S: Final = 5.0
"""By how much a node's clock differs from the head's where that is recorded: a report may take seconds on its way."""
_LAST_WORD_S: Final = 1.5
_FIRST_REPORT_S: Final = 20.0
"""Seconds for the agents of your own program to start and report after its launcher has ended."""
_REPORTS_S: Final = 5.0
"""Seconds for all nodes to report after a rank's end: agents wait for the record of an end."""
_SILENT_S: Final = 3.0
"""Seconds: nodes report once a second, so one silent for this long may be lost."""
_DEVICES_S: Final = 60.0
"""Seconds for the devices of all nodes to become free: an agent that has lost its head holds them for up to 30 s, and
then they have to stay free for 20 s."""
_SHOWN: Final = 5
_MAY_FOLLOW: Final = (Cause.RANK_EXITED, Cause.RANK_GONE, Cause.PROGRAM_FAILED)
"""A program that loses a node may end with an error before the node's silence is noticed."""


class Observations:
    """What is kept of a run over all its attempts."""

    def __init__(self, folder: Path, supervision: Supervision) -> None:
        self.metrics, self.ranks, self.disks = PrintedMetrics(folder, supervision), RankTable(folder), Disks(folder)
        self.preemption = ProgramPreemption(folder, supervision)
        self.preemption_requested = False
        """Set when a scheduler has sent SIGTERM or SIGUSR1 to all processes of its job, this one included."""


class Attempt:
    """The launcher of a run and its ranks, from their start to their end."""

    def __init__(
        self,
        folder: Path,
        supervision: Supervision,
        lease: HeldLease,
        agents: AgentConnections,
        observations: Observations,
    ) -> None:
        self._folder, self._supervision, self._lease = folder, supervision, lease
        self._agents, self._observations = agents, observations
        self.steps = Iterations()
        self.events_before = event_count(folder)
        self._launcher: LauncherProcess | None = None
        self._script = run_folder.LAUNCH_SCRIPT
        self._says_limit = True

    def begin(self, script: str) -> None:
        """Starts the launcher with ``script``, once the devices are locked, and connects to the node agents."""
        self._lease.check()
        self._script = script
        if not self._supervision.devices:
            self._launch()
        self._agents.poll(0.0)

    def _launch(self) -> None:
        self._launcher = LauncherProcess(self._folder, self._script, self._supervision.head)
        self._observations.metrics.begin(self._launcher.log_offset, self._supervision)
        self._agents.launched()

    def abandon(self) -> None:
        """Ends the launcher."""
        if self._launcher is not None:
            self._launcher.kill()

    def run(self) -> tuple[int, Verdict | None]:
        """Waits for its end, and ends what is left.

        Returns the run's provisional exit code, and the verdict if something failed."""
        if self._supervision.devices and self._launcher is None:
            if (refused := self._wait_for_devices()) is not None:
                return refused.code, self._record(refused)
            if self._is_stopped():
                return run_folder.EXIT_STOPPED, None
            self._lease.check()
            self._launch()
        verdict = self._wait()
        if verdict is None and self._is_program_preempted():
            append_event(self._folder, Event.RUN_PREEMPTED)
        elif verdict is None and self._observations.preemption_requested:
            verdict = self._wait_for_ranks()
        elif not self._is_stopped() and (ended := self._ended_by_agents()) is not None:
            self._print(str(ended))
            self._end_all()
            return ended.code, ended
        if self._is_preempted():
            self._wait_for_launcher(_OWN_END_S)
            self._end_all()
            self._observations.metrics.read()
            return run_folder.EXIT_PREEMPTED, None
        if verdict is None and not self._is_stopped():
            verdict = self._launcher_verdict()
        if verdict is not None and (verdict.cause in _MAY_FOLLOW or verdict.asked_to_end):
            verdict = self._lost_peer() or verdict
        if verdict is not None and self._supervision.observed and verdict.cause.event is Event.RANK_DIED:
            verdict = self._earliest_death() or verdict
            if verdict.asked_to_end and not process_records.folder_of(self._folder, "").exists():
                self._wait_for_launcher(_OWN_END_S)  # which ended the rank for another one, that nothing has seen
                verdict = self._failed_node(verdict.code) or verdict
        if verdict is not None and verdict.cause is not Cause.LAUNCHER_EXITED:
            verdict = self._record(verdict)
        if verdict is not None and verdict.cause.event in (Event.RUN_FAILED, Event.RANK_DIED):
            self._wait_for_launcher(_OWN_END_S)
        if verdict is None and not self._is_stopped():
            self._wait_for_the_last(_OWN_END_S)
        self._end_all()
        self._observations.metrics.read()
        if self._is_stopped():
            return run_folder.EXIT_STOPPED, None
        if verdict is None:
            return 0, None
        if verdict.cause is Cause.LAUNCHER_EXITED:
            verdict = self._started.lost_session() or self._silent_node() or self._node_without_head() or verdict
            verdict = self._record(verdict)
        return verdict.code, verdict

    def _wait_for_devices(self) -> Verdict | None:
        """Waits until every node has locked its devices, or the run is to be stopped; returns why it cannot begin."""
        since = math.inf
        while (found := self._agents.lock_devices()) is not None and not self._is_stopped():
            self._agents.poll(_TICK_S)
            errors = self._agents.ssh_errors()
            if (end := refused_node(errors) or lost_node(self._agents.silence_s(), errors)) is not None:
                return end
            node, devices = found[0], ", ".join(found[1])
            if devices and since == math.inf:
                since = time.monotonic()
                self._print(f"waits for {devices} on {node}, which another run uses")
            elif devices and time.monotonic() > since + _DEVICES_S and not self._supervision.queued:
                todo = "wait for it (--queue), leave its slots out (--exclude), or give --share"
                what = f"finds {devices} in use by another run, maybe of another cluster (see tridock status); {todo}"
                return Verdict(Cause.DEVICES_TAKEN, what, node, code=RequestError.exit_code)
        return None

    def _wait(self) -> Verdict | None:
        """Waits until the launcher has ended, the run is to be stopped, or something is wrong."""
        while self._started.exit_code is None:
            self._agents.poll(_TICK_S)
            _say_removed(self._folder, self._agents)
            if self._is_stopped():
                self._wait_for_launcher(_STOPPED_PATIENCE_S)
                return None
            seen = self._agents.statuses()
            self.steps.note(seen)
            self._observations.ranks.note(seen, self._limits)
            self._say_limit(seen)
            self._observations.disks.note(self._agents.disks())
            self._observations.metrics.read()
            self._started.limit_log()
            starts = not self._supervision.observed and not self.steps.has_begun
            if starts and (refused := self._started.refused_login()) is not None:
                return refused
            if self._is_program_preempted():
                if lost := lost_node(self._agents.silence_s(), self._agents.ssh_errors()):
                    return lost
                if self._observations.preemption.is_overdue(seen):
                    return None
            elif (verdict := self._judge(seen)) is not None and not self._started.was_killed:
                return verdict
        return None

    def _say_limit(self, seen: StatusByNode) -> None:
        """Prints, once an attempt, a limit that the ranks have learnt if it is longer than ``launch.hang_timeout``."""
        limits, longest = self._limits, longest_step_s(seen)
        if self._says_limit and limits.hang_s and longest * STEPS > limits.hang_s:
            self._says_limit = False
            limit = learnt_s(limits.hang_s, longest, limits.planned_step_s)
            self._print(f"a step takes {longest:,.0f} s: a rank counts as hung after {limit:,.0f} s without progress")

    def _is_program_preempted(self) -> bool:
        """Whether a scheduler has asked your own program to end: it can then be resumed, however it ends."""
        received = self._observations.preemption_requested
        return not self._is_stopped() and self._observations.preemption.is_requested(self._agents, received=received)

    def _wait_for_ranks(self) -> Verdict | None:
        """Waits until the ranks have saved and ended: the signal also reached their launcher, which does not wait."""
        while any(status.alive for _, status in each(self._agents.statuses())):
            self._agents.poll(_TICK_S)
            if self._is_stopped() or (verdict := first_death(self._agents.statuses())) is not None:
                return None if self._is_stopped() else verdict
        return None

    def _judge(self, seen: StatusByNode) -> Verdict | None:
        silence = self._agents.silence_s()
        verdict = first_death(seen) or lost_node(silence, self._agents.ssh_errors())
        if verdict is not None:
            return verdict
        if max(silence.values()) < _SILENT_S and (lost := rank_without_peer(seen)) is not None:
            return lost
        if (apart := separate_worlds(seen, self._supervision.ranks, per_slot=self._supervision.per_slot)) is not None:
            return apart
        limits = self._limits
        overdue = overdue_ranks(seen, limits)
        if not overdue:
            return None
        living = [status.rank for _, status in each(seen) if status.alive]
        stacks = self._agents.stacks(living, _STACKS_PATIENCE_S)
        seen = self._agents.statuses()
        # Checked again: the rank may have continued before the stacks arrived.
        overdue = overdue_ranks(seen, limits)
        if not overdue:
            return None
        return build_locked(seen, self._agents.build_locks) or hung(seen, overdue, stacks, limits)

    @property
    def _limits(self) -> HangLimits:
        return HangLimits(self._supervision.hang_timeout_s, self._supervision.planned_step_s)

    def _launcher_verdict(self) -> Verdict | None:
        """Returns why the launcher ended before the run: a rank's death, which its node will report, or its own."""
        began = time.monotonic()
        latest = began + (_FIRST_REPORT_S if self._supervision.observed else _LAST_WORD_S)
        while not self._is_done():
            heard = self._agents.have_reported_since(began)
            if (now := time.monotonic()) > latest or (heard and now > began + _LAST_WORD_S):
                end = self._as_failed(self._started.verdict())
                of_ranks = self._started.has_ranks_exit_code
                first = first_gone(self._agents.statuses(), code=end.code) if of_ranks else None
                return first or self._failed_node(end.code) or end
            self._agents.poll(_TICK_S)
            if (dead := first_death(self._agents.statuses())) is not None and not self._started.was_killed:
                return dead
        return None

    def _earliest_death(self) -> Verdict | None:
        """Returns the rank of your own program that failed first, once every node has reported again.

        Ranks may end within milliseconds, and the first report may name one that its launcher ended because of another.
        """
        began = time.monotonic()
        while not self._agents.have_reported_since(began) and time.monotonic() < began + _REPORTS_S:
            self._agents.poll(_TICK_S)
        return first_death(self._agents.statuses())

    def _failed_node(self, code: int) -> Verdict | None:
        """Returns the node whose program failed first, if the launcher has recorded it."""
        found = events_of(self._folder, Event.NODE_FAILED, self.events_before)
        return recorded(found[0], code) if found else None

    def _as_failed(self, end: Verdict) -> Verdict:
        """Returns the end of the launcher with the code of the run: a failure of your own program is one, with whatever
        code it or its launcher ends."""
        return replace(end, code=RunError.exit_code) if self._supervision.observed else end

    def _lost_peer(self) -> Verdict | None:
        """Returns the node that was lost with its ranks: other ranks fail at once, before its silence is noticed."""
        began = time.monotonic()
        while max(self._agents.silence_s().values()) >= time.monotonic() - began:
            if max(self._agents.silence_s().values()) >= _SILENT_S:
                return self._silent_node()
            self._agents.poll(_TICK_S)
        return None

    def _silent_node(self) -> Verdict | None:
        """Returns the node that does not answer, if any; waits until that is certain."""
        while max(self._agents.silence_s().values()) >= _SILENT_S:
            self._agents.poll(_TICK_S)
            if lost := lost_node(self._agents.silence_s(), self._agents.ssh_errors()):
                return lost
        return None

    def _end_all(self) -> None:
        """Ends the run's processes on all nodes, including orphans of its launcher.

        The head's own agent ends the launcher too, without DeepSpeed's ``pkill`` on every node, which hits other runs
        as well.
        """
        self._lease.check()
        remaining = stop(self._folder, self._agents)
        self._started.kill()
        if any(remaining.values()):
            self._print(f"processes that do not end: {counted(remaining)}")

    def _wait_for_launcher(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._started.exit_code is None and time.monotonic() < deadline:
            self._agents.poll(_TICK_S)

    def _wait_for_the_last(self, seconds: float) -> None:
        """Waits for processes that end by themselves here, including launchers of further nodes on this machine."""
        deadline = time.monotonic() + seconds
        while find_processes(self._folder.name) and time.monotonic() < deadline:
            self._agents.poll(_TICK_S)

    @property
    def _started(self) -> LauncherProcess:
        assert self._launcher is not None
        return self._launcher

    def _is_done(self) -> bool:
        """Whether the run finished, as reported by the launcher or by every rank.

        A launcher that lost the connection to a node reports a failure, whatever its ranks did there.
        """
        if self._supervision.observed:
            return self._started.exit_code == 0
        if not events_of(self._folder, Event.RUN_FINISHED):
            return False
        if self._started.exit_code == 0:
            return True
        ended = {status.rank for _, status in each(self._agents.statuses()) if status.phase == heartbeat.END}
        ranks = {rank for numbers in self._supervision.ranks.values() for rank in numbers}
        return bool(ranks) and ended == ranks

    def _ended_by_agents(self) -> Verdict | None:
        """Returns why the agents ended the run: this process was suspended, so they received no orders.

        The head's own agent says so. One of another node may only have lost the network between them; but where its
        SIGTERM reached ranks that then saved and ended together, as for a scheduler that did not ask, it was that.
        """
        lost = events_of(self._folder, Event.HEAD_LOST, self.events_before) if self._supervision.on_head else []
        saved = self._is_preempted() and not self._observations.preemption_requested
        own = next((event for event in lost if saved or event["node"] == self._supervision.head), None)
        return None if own is None else recorded(own)

    def _node_without_head(self) -> Verdict | None:
        """Returns the node that ended its ranks because the head could not reach it: the others, and then the launcher,
        failed without them."""
        lost = [] if self._started.was_killed else events_of(self._folder, Event.HEAD_LOST, self.events_before)
        return recorded(lost[0]) if lost else None

    def _is_preempted(self) -> bool:
        return bool(events_of(self._folder, Event.RUN_PREEMPTED, self.events_before))

    def _record(self, verdict: Verdict) -> Verdict:
        """Records the verdict, and beside it the attempt's memory kills, faults of links, and clocks that differ now;
        returns what is recorded.
        """
        self._lease.check()
        kills = self._agents.memory_kills()
        for node, processes in kills.items():
            append_event(self._folder, Event.MEMORY_KILLS, node=node, processes=processes)
        for node, links in self._agents.link_faults().items():
            for it in links:
                append_event(self._folder, Event.LINK_FAULTS, node=node, link=it.name, downs=it.downs)
        for node, seconds in self._agents.clocks_s().items():
            if abs(seconds) > _CLOCK_S:
                append_event(self._folder, Event.CLOCK_DIFFERS, node=node, seconds=round(seconds, 1))
        if kills and verdict.cause is not Cause.RANK_KILLED_FOR_MEMORY:
            beside = f"the kernel killed a process for memory on {', '.join(kills)}"
            verdict = replace(verdict, reason=f"{verdict.reason}; {beside}")
        known = (Event.RUN_FAILED, Event.NODE_FAILED, Event.HEAD_LOST)  # by ranks, the launcher, and a node's agent
        seen = verdict.cause in (Cause.LOGIN_REFUSED, Cause.SEPARATE_WORLDS, Cause.DEVICES_TAKEN)
        own = seen and self._failed_node(verdict.code) is None
        if verdict.cause.event not in known or own:
            about = {"rank": verdict.rank, "node": verdict.node, "exit_code": verdict.code, "cause": verdict.cause}
            about |= {"path": verdict.path, "wait_status": verdict.wait_status}
            given = {name: value for name, value in about.items() if value is not None}
            append_event(self._folder, verdict.cause.event, **given, reason=verdict.reason)
        self._print(str(verdict))
        return verdict

    def _is_stopped(self) -> bool:
        return is_stopped(self._folder, self._agents)

    def _print(self, line: str) -> None:
        say(self._folder, line)


def is_stopped(folder: Path, agents: AgentConnections) -> bool:
    """Whether a user has stopped the run, on any node."""
    stopped = (folder / run_folder.STOPPED).exists()
    if not stopped and (stopped := agents.is_stop_asked()):
        mark_stopped(folder)
    return stopped


def say(folder: Path, line: str) -> None:
    """Prints a line of the supervisor's to the launcher's log."""
    append(folder / run_folder.LAUNCHER_LOG, f"tridock: {line}\n".encode())


def stop(folder: Path, agents: AgentConnections) -> dict[str, int]:
    """Ends the run's processes on all nodes; returns how many remain on each, and says what they had left."""
    remaining = agents.stop(TERM_S, STOP_PATIENCE_S)
    _say_removed(folder, agents)
    return remaining


def _say_removed(folder: Path, agents: AgentConnections) -> None:
    for node, paths in agents.take_removed().items():
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        say(folder, f"removed what killed processes had left on {node}: {', '.join(paths[:_SHOWN])}{more}")


def counted(remaining: Mapping[str, int]) -> str:
    """Returns the nodes with processes that do not end, and how many each has, to print."""
    return ", ".join(f"{count} on {node}" for node, count in remaining.items() if count)
