"""Heartbeats: each rank writes its progress to a small file at every step, and its node's agent reads it.

``<run>/.heartbeat/rank-<N>`` holds one line of fixed size, overwritten in place: a write takes microseconds and is
never synced to disk. Within a step, each micro-batch moves its time on (:func:`touch`). When a heartbeat is too old,
the agent requests the rank's stacks with :data:`STACKS_SIGNAL`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

FOLDER: Final = ".heartbeat"
# At these named pipes torch's flight recorders are asked for a dump; torch appends the rank's number and ".pipe".
FLIGHT_PIPES: Final = f"{FOLDER}/flight-"

# The phases of a rank: before its first step, in its first step, training, evaluating, saving a checkpoint, finished,
# failed by itself, or ending because it lost another rank or was asked to end.
START, FIRST_STEP, TRAIN, EVAL, SAVE = ("start", "first_step", "train", "eval", "save")
END, FAILED, LOST = ("end", "failed", "lost")
# For a rank without heartbeats: its agent observes whether it computes or writes.
OBSERVED: Final = "observed"
# For such a rank that ended unobserved: only its launcher has the exit code.
GONE: Final = "gone"

# No launcher or library sends this signal.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 1

_SIZE: Final = 128
_KEPT_STEPS: Final = 64
_TOUCH_S: Final = 0.25


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank.

    ``pid`` and ``start_ticks`` (clock ticks since boot) distinguish its process from a later one with the same pid.
    ``count`` is the number of heartbeats: ranks run in step, so the one with fewer is behind. ``time_s`` is the node's
    monotonic clock in seconds. ``steps`` counts the steps after the first one; ``longest_step_s`` is the longest of the
    last 64, the first one included.
    """

    pid: int
    start_ticks: int
    count: int
    iteration: int
    phase: str
    code: int
    time_s: float
    steps: int = 0
    longest_step_s: float = 0.0


class HeartbeatWriter:
    """A rank's heartbeat file: one line of fixed length, overwritten by each beat."""

    def __init__(self, folder: Path, rank: int) -> None:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        self._file = os.open(path_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._process = f"{os.getpid()} {start_ticks(os.getpid())}"
        self._count = self._iteration = self._steps = self._code = 0
        self._phase, self._beat_at, self._written_at = START, 0.0, 0.0
        self._step_times: deque[float] = deque(maxlen=_KEPT_STEPS)

    def beat(self, phase: str, iteration: int | None = None, code: int = 0) -> None:
        """Writes the phase; ``iteration`` is the last finished one, unchanged if omitted; ``code`` the exit code."""
        now = time.monotonic()
        if phase == TRAIN and iteration is not None and self._phase in (FIRST_STEP, TRAIN):
            self._step_times.append(now - self._beat_at)
            self._steps += self._phase == TRAIN
        self._count += 1
        self._iteration = self._iteration if iteration is None else iteration
        self._phase, self._code, self._beat_at = phase, code, now
        self._write(now)

    def touch(self) -> None:
        """Writes that the rank makes progress within what its last beat began, at most four times a second."""
        if (now := time.monotonic()) - self._written_at >= _TOUCH_S:
            self._write(now)

    def _write(self, now: float) -> None:
        self._written_at = now
        line = f"{self._process} {self._count} {self._iteration} {self._phase} {self._code} {now:.3f}"
        line += f" {self._steps} {max(self._step_times, default=0.0):.3f}"
        with suppress(OSError):  # the next checkpoint reports a full disk
            os.pwrite(self._file, f"{line:<{_SIZE - 1}}\n".encode(), 0)


_writer: HeartbeatWriter | None = None


def start(folder: Path, rank: int) -> None:
    """Makes this process a rank of the run in ``folder``."""
    global _writer  # one process is one rank: the training loops of three engines reach it without a parameter
    _writer = HeartbeatWriter(folder, rank)
    _writer.beat(START)


def beat(phase: str, iteration: int | None = None, code: int = 0) -> None:
    """Calls :meth:`HeartbeatWriter.beat` of this process; does nothing if it is not a rank of a run."""
    if _writer is not None:
        _writer.beat(phase, iteration, code)


def touch() -> None:
    """Calls :meth:`HeartbeatWriter.touch` of this process; does nothing if it is not a rank of a run."""
    if _writer is not None:
        _writer.touch()


def touching(items: Iterable[T]) -> Iterator[T]:
    """Yields the items; each is progress, as of :func:`touch`."""
    for item in items:
        touch()
        yield item


def path_of(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's heartbeat."""
    return folder / FOLDER / f"rank-{rank}"


def ranks(folder: Path) -> list[int]:
    """The ranks that have a heartbeat file on this node, sorted."""
    return sorted(int(path.name.removeprefix("rank-")) for path in (folder / FOLDER).glob("rank-*"))


def stacks_path(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks on :data:`STACKS_SIGNAL`."""
    return folder / FOLDER / f"stacks-{rank}"


def read(folder: Path, rank: int) -> Heartbeat | None:
    """Returns the rank's last heartbeat, or None before the first one or while it is being written."""
    try:
        words = path_of(folder, rank).read_bytes()[:_SIZE].decode().split()
        pid, ticks, count, iteration, phase, code, time_s, steps, longest = words
        numbers = int(pid), int(ticks), int(count), int(iteration)
        return Heartbeat(*numbers, phase, int(code), float(time_s), int(steps), float(longest))
    except (OSError, ValueError):
        return None


def start_ticks(pid: int) -> int:
    """Returns a process's start time in clock ticks since boot (proc(5), field 22). Raises OSError if it is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
