"""The current status of this node's ranks, from their heartbeats and from the kernel's view of their processes."""

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, process_records, run_folder
from tridock.contracts.hang_limits import LIMITS, PROGRESS_BYTES
from tridock.contracts.heartbeat import Heartbeat
from tridock.contracts.process_records import ProcessRecord
from tridock.contracts.rank_status import LinkFaults, RankStatus
from tridock.contracts.rotated_logs import tail
from tridock.node.agent.flight_records import DUMPS_S, ask_for_dumps, wait_for_dumps
from tridock.node.agent.links import link_counters, link_faults
from tridock.node.agent.memory_kills import memory_kills
from tridock.node.agent.observed_ranks import ObservedRanks
from tridock.node.agent.processes import find_processes
from tridock.node.agent.program_stacks import program_stacks
from tridock.node.process_end import process_state, reaped_status

_SEARCH_S: Final = 2.0
_STACKS_S: Final = 1.0
_STACKS_BYTES: Final = 1 << 20
_RECORD_S: Final = 3.0
"""Seconds for the record of a rank's end, after the agent sees that the rank is gone."""


class RankMonitor:
    """Reads the status of ranks; remembers when it first saw a rank dead or stopped, and the rank's wait status."""

    def __init__(self, folder: Path, ranks: Sequence[int], *, observed: bool = False, node: str = "") -> None:
        self.folder, self.ranks, self._node = folder, tuple(ranks), node
        self._observed = ObservedRanks(folder.name) if observed else None
        self._memory_kills_before, self._links_before = memory_kills(), link_counters()
        self._pidfds: dict[int, int] = {}
        self._signalled: set[tuple[int, int]] = set()
        self._clear()

    def _clear(self) -> None:
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds = {}
        self._dead_since: dict[int, float] = {}
        self._wait_status: dict[int, int] = {}
        self._stopped_since: dict[int, float] = {}
        self._records: dict[int, ProcessRecord] = {}
        self._moved: dict[int, tuple[int, int, float]] = {}
        self._searched, self._had_processes, self._all_ended = 0.0, False, False

    def reset(self) -> None:
        """Removes the heartbeats and forgets everything, for ranks that will be started again."""
        for rank in self.ranks:
            heartbeat.path_of(self.folder, rank).unlink(missing_ok=True)
            Path(f"{self.folder / heartbeat.FLIGHT_PIPES}{rank}.pipe").unlink(missing_ok=True)
        if self._observed is not None:
            self._observed.reset()
            process_records.remove(self.folder, self._node)
        self._memory_kills_before, self._links_before = memory_kills(), link_counters()
        self._clear()

    def read(self) -> list[RankStatus]:
        """Returns the status of every rank that has started, or of all ranks once the run's processes have ended."""
        beats = {rank: beat for rank in self.ranks if (beat := heartbeat.read(self.folder, rank)) is not None}
        if self._observed is not None:
            self._read_records()
            recorded = {rank: _begun(record) for rank, record in self._records.items()}
            observed = recorded | self._observed.read() | beats
            return [self._as_observed(self._status(rank, beat)) for rank, beat in observed.items()]
        found = [self._status(rank, beat) for rank, beat in beats.items()]
        missing = [rank for rank in self.ranks if rank not in beats]
        if missing and self._processes_ended():
            found += [self._status(rank, _NEVER) for rank in missing]
        return found

    def _as_observed(self, status: RankStatus) -> RankStatus:
        """Returns the status of an observed rank. A program reports no end, so exit code 0 means done."""
        assert self._observed is not None
        world_size, inner = self._observed.world_sizes(status.rank)
        status = replace(status, world_size=world_size, inner_world_size=inner)
        if status.alive or status.wait_status:
            return status
        return replace(status, phase=heartbeat.GONE if status.wait_status is None else heartbeat.END)

    def _read_records(self) -> None:
        """Reads the records that are new or were not complete."""
        for rank, path in process_records.names(self.folder, self._node).items():
            known = self._records.get(rank)
            if (known is None or known.ended_s is None) and (record := process_records.read(path)) is not None:
                self._records[rank] = record

    @property
    def memory_kills(self) -> int:
        """How many processes the kernel has killed here for memory since the attempt's start."""
        before = (record.memory_kills for record in self._records.values())
        return max(0, memory_kills() - min(before, default=self._memory_kills_before))

    @property
    def link_faults(self) -> tuple[LinkFaults, ...]:
        """The network links here that went down since the attempt's start."""
        return link_faults(self._links_before, link_counters())

    @property
    def awaits_records(self) -> bool:
        """Whether a rank is gone whose end is not recorded yet: which one was first is not known before."""
        now = time.monotonic()
        return any(
            record.ended_s is None and rank in self._dead_since and now - self._dead_since[rank] < _RECORD_S
            for rank, record in self._records.items()
        )

    def pidfds(self) -> list[int]:
        """Returns pidfds that become readable when a rank dies: older kernels forget how it ended once it is reaped."""
        return list(self._pidfds.values())

    def _status(self, rank: int, beat: Heartbeat) -> RankStatus:
        now = time.monotonic()
        if rank not in self._pidfds and rank not in self._dead_since:
            with suppress(OSError):  # it has ended, or the kernel is older than 5.3: the next read detects it as well
                self._pidfds[rank] = os.pidfd_open(beat.pid)
        state, wait_status = process_state(beat)
        if state is None:
            if rank in self._pidfds:
                pidfd = self._pidfds.pop(rank)
                wait_status = reaped_status(pidfd) if wait_status is None else wait_status
                os.close(pidfd)
            self._dead_since.setdefault(rank, now)
            if (record := self._record_of(rank, beat)) is not None and record.ended_s is not None:
                self._dead_since[rank] = record.ended_s
                wait_status = record.wait_status if wait_status is None else wait_status
            if wait_status is not None:
                self._wait_status[rank] = wait_status
        if state in ("T", "t"):
            self._stopped_since.setdefault(rank, now)
        else:
            self._stopped_since.pop(rank, None)
        return RankStatus(
            rank,
            beat.phase,
            beat.iteration,
            beat.count,
            beat.code,
            age_s=round(now - max(beat.time_s, self._moved_at(rank, beat, now)), 2) if beat.time_s else 0.0,
            alive=state is not None,
            gone_s=round(now - self._dead_since[rank], 3) if state is None else 0.0,
            wait_status=self._wait_status.get(rank),
            stopped_s=round(now - self._stopped_since.get(rank, now), 2),
            killed_for_memory=self.memory_kills > 0,
            steps=beat.steps,
            longest_step_s=beat.longest_step_s,
        )

    def _record_of(self, rank: int, beat: Heartbeat) -> ProcessRecord | None:
        record = self._records.get(rank)
        same = record is not None and (record.pid, record.start_ticks) == (beat.pid, beat.start_ticks)
        return record if same else None

    def _moved_at(self, rank: int, beat: Heartbeat, now: float) -> float:
        """Returns when a rank in a phase that moves bytes was last seen to have moved enough of them; else 0."""
        limit = LIMITS.get(beat.phase)
        if limit is None or not limit.counts_bytes or (moved := bytes_moved(beat.pid)) is None:
            self._moved.pop(rank, None)
            return 0.0
        count, before, at = self._moved.get(rank, (beat.count, moved, 0.0))
        if count != beat.count:
            before, at = moved, 0.0
        elif moved - before >= PROGRESS_BYTES:
            before, at = moved, now
        self._moved[rank] = beat.count, before, at
        return at

    def _processes_ended(self) -> bool:
        """Whether the run had processes here and has none now; checked at most every 2 s, as it reads all of /proc."""
        now = time.monotonic()
        if now - self._searched >= _SEARCH_S:
            found = bool(find_processes(self.folder.name))
            self._all_ended = self._had_processes and not found
            self._had_processes = self._had_processes or found
            self._searched = now
        return self._all_ended

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the ranks of your own program on this node, once to each rank's outermost process."""
        for beat in self._observed.read().values() if self._observed is not None else ():
            process = beat.pid, beat.start_ticks
            if process not in self._signalled and process_state(beat)[0] is not None:
                self._signalled.add(process)
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, number)

    def stacks(self, ranks: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """Returns the frames of each rank's main thread, the innermost first.

        The stacks of all threads go to the rank's log. A rank writes them if it can; py-spy reads those of others. A
        stopped rank has none. On GPUs its flight recorder writes what it has recorded, too.
        """
        began = time.monotonic()
        asked: dict[int, tuple[Path, int]] = {}
        others: dict[int, int] = {}
        observed = self._observed.read() if self._observed is not None else {}
        for rank in set(ranks).intersection(self.ranks):
            beat, path = heartbeat.read(self.folder, rank), heartbeat.stacks_path(self.folder, rank)
            if (process := observed.get(rank, beat)) is None or process_state(process)[0] in (None, "T", "t"):
                continue
            if beat is not None and path.exists():
                asked[rank] = path, path.stat().st_size
                os.kill(beat.pid, heartbeat.STACKS_SIGNAL)
            else:
                others[rank] = process.pid
        dumps = ask_for_dumps(self.folder, [*asked, *others])
        texts = program_stacks(others, find_processes(self.folder.name)) if others else {}
        if asked:
            time.sleep(_STACKS_S)
        written = {rank: tail(path, _STACKS_BYTES, size) for rank, (path, size) in asked.items()}
        texts |= {rank: text.decode(errors="replace") for rank, text in written.items()}
        for rank, text in texts.items():
            with (self.folder / run_folder.rank_log(rank)).open("a") as log:
                log.write(f"tridock: rank {rank} makes no progress; its threads:\n{text}")
        wait_for_dumps(dumps, began + DUMPS_S)
        return {rank: frames for rank, text in texts.items() if (frames := main_thread(text))}


def _begun(record: ProcessRecord) -> Heartbeat:
    """Returns the first heartbeat of a rank that is known only from its record."""
    return Heartbeat(record.pid, record.start_ticks, 0, 0, heartbeat.OBSERVED, 0, record.started_s)


_NEVER: Final = Heartbeat(0, 0, 0, 0, heartbeat.START, 0, 0.0)


def bytes_moved(pid: int) -> int | None:
    """Returns the bytes that a process has read and written, by calls and in mapped files; None if that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def main_thread(text: str) -> tuple[str, ...]:
    """Returns the main thread's frames, which faulthandler writes last, as ``file:line in function``."""
    frames = text.rpartition("(most recent call first):")[2]
    found = re.findall(r'File "(.+?)", line (\d+) in (.+)', frames)
    return tuple(f"{file}:{line} in {name}" for file, line, name in found)
