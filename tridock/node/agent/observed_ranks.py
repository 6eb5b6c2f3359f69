"""Observes ranks of a program without heartbeats: found by their environment, alive while they are active."""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat
from tridock.contracts.environment import rank_of, world_size_of
from tridock.contracts.heartbeat import Heartbeat
from tridock.contracts.node_answers import Process
from tridock.node.agent.processes import find_processes

_SEARCH_S: Final = 1.0
_WORKING: Final = 0.02
"""CPU use as a share of a core: a process that waits for others uses less."""
_LAUNCHER: Final = re.compile(
    r"(^|/)(torchrun|accelerate(-launch)?|deepspeed|composer|mpirun|mpiexec|orted|prted)$"
    r"|^(torch\.distributed\.(run|launch)|deepspeed\.launcher\.\w+|accelerate\.commands\.launch)$"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank's outermost process, with the CPU seconds and bytes written of it and its children, and the sizes of its
    world and of another one that a process below it is in.
    """

    pid: int
    start_ticks: int
    cpu_s: float
    written: int
    world_size: int = 0
    inner_world_size: int = 0


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

    def world_sizes(self, rank: int) -> tuple[int, int]:
        """Returns the size of a rank's world, and of another one that a process below it is in; 0 for none."""
        seen = self._ranks[rank].seen if rank in self._ranks else None
        return (seen.world_size, seen.inner_world_size) if seen else (0, 0)

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
    activity of all counts. Of two worlds, as with an inference engine that a rank starts, the larger counts.
    """
    found = {process.pid: process for process in find_processes(run_id)}
    places = {pid: place for pid in found if (place := _place_of(pid)) is not None}
    seen: dict[int, Seen] = {}
    for pid, (rank, world_size) in places.items():
        above = places.get(found[pid].ppid)
        if above == (rank, world_size) or (rank in seen and seen[rank].world_size >= world_size):
            continue
        own = [it for it, place in places.items() if place == (rank, world_size)]
        inner = (
            size
            for it, (_, size) in places.items()
            if places[it] != (rank, world_size) and _is_below(it, pid, found) and _is_launched(it, found)
        )
        with suppress(OSError):  # it has ended
            cpu_s, written = sum(found[it].cpu_s for it in own), sum(map(_written, own))
            inner_world_size = max(inner, default=0)
            seen[rank] = Seen(pid, heartbeat.start_ticks(pid), cpu_s, written, world_size, inner_world_size)
    return seen


def _is_below(pid: int, other: int, found: Mapping[int, Process]) -> bool:
    """Whether a process is a descendant of the ``other`` one; both of the same run."""
    while pid != other and pid in found:
        pid = found[pid].ppid
    return pid == other


def _is_launched(pid: int, found: Mapping[int, Process]) -> bool:
    """Whether a launcher of ranks has started the process, unlike the workers of an inference engine."""
    parent = found.get(found[pid].ppid)
    return parent is not None and any(_LAUNCHER.search(word) for word in parent.command[:5])


def _place_of(pid: int) -> tuple[int, int] | None:
    """Returns the rank and the size of its world, 0 if that is not said; None for a process that is not a rank."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    variables = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    rank = rank_of(variables)
    return None if rank is None else (rank, world_size_of(variables))


def _written(pid: int) -> int:
    """Returns the bytes that the process has written, to files or to its output."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("wchar:")), 0)
