"""Observes ranks of a program without heartbeats: found by their environment, alive while they are active."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat
from tridock.contracts.environment import rank_of
from tridock.contracts.heartbeat import Heartbeat
from tridock.node.agent.processes import find_processes

_SEARCH_S: Final = 1.0
_WORKING: Final = 0.02
"""CPU use as a share of a core: a process that waits for others uses less."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank's outermost process, with the CPU seconds and bytes written of it and its children."""

    pid: int
    start_ticks: int
    cpu_s: float
    written: int


@dataclass(slots=True)
class _Rank:
    seen: Seen
    seen_at: float
    active_at: float
    """The time of its last activity."""
    count: int = 0


class ObservedRanks:
    """Finds the ranks of a run on this node, and records when each last wrote or computed something."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._ranks: dict[int, _Rank] = {}
        self._searched = 0.0

    def reset(self) -> None:
        self._ranks.clear()

    def read(self) -> dict[int, Heartbeat]:
        """Returns a heartbeat for each rank that was ever found; ``count`` grows with its activity."""
        now = time.monotonic()
        if now - self._searched >= _SEARCH_S:
            self._searched = now
            for rank, seen in find_ranks(self._run_id).items():
                self._note(rank, seen, now)
        phase = heartbeat.OBSERVED
        return {
            rank: Heartbeat(it.seen.pid, it.seen.start_ticks, it.count, 0, phase, 0, it.active_at)
            for rank, it in self._ranks.items()
        }

    def _note(self, rank: int, seen: Seen, now: float) -> None:
        known = self._ranks.get(rank)
        if known is None or (known.seen.pid, known.seen.start_ticks) != (seen.pid, seen.start_ticks):
            self._ranks[rank] = _Rank(seen, now, now)
            return
        idle = 0.0 <= seen.cpu_s - known.seen.cpu_s <= _WORKING * (now - known.seen_at)
        if not idle or seen.written != known.seen.written:
            known.active_at, known.count = now, known.count + 1
        known.seen, known.seen_at = seen, now


def find_ranks(run_id: str) -> dict[int, Seen]:
    """Returns the processes of a run on this node, by rank.

    A rank's children, such as data loader workers, inherit its environment: the outermost process is the rank, and the
    activity of all counts.
    """
    found = {process.pid: process for process in find_processes(run_id)}
    ranks = {pid: rank for pid in found if (rank := _rank_of(pid)) is not None}
    seen: dict[int, Seen] = {}
    for pid, rank in ranks.items():
        if ranks.get(found[pid].ppid) == rank:
            continue
        own = [it for it, its_rank in ranks.items() if its_rank == rank]
        with suppress(OSError):  # it has ended
            cpu_s, written = sum(found[it].cpu_s for it in own), sum(map(_written, own))
            seen[rank] = Seen(pid, heartbeat.start_ticks(pid), cpu_s, written)
    return seen


def _rank_of(pid: int) -> int | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return rank_of(dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry))


def _written(pid: int) -> int:
    """Returns the bytes that the process has written, to files or to its output."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("wchar:")), 0)
