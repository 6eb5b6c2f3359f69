"""A rank's pulse: how far it has come, in a small file that it writes at every step and that its node's watch reads.

``<run>/.pulse/rank-<N>`` holds one line of fixed size, overwritten in place: a write of some microseconds, never synced
to the disk. Whoever finds the beat old asks the rank for its stacks with :data:`STACKS_SIGNAL`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = ".pulse"

# A rank is in one of these: before its first step, between steps, in an evaluation, in a checkpoint; it has ended well,
# has failed of itself, or ends because another rank has gone or because it was told to.
START, TRAIN, EVAL, SAVE, END, FAILED, LOST = PHASES = ("start", "train", "eval", "save", "end", "failed", "lost")

# One that no launcher and no library sends.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 1

_SIZE: Final = 96


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last said of itself.

    ``pid`` and ``began`` (clock ticks since the boot) tell its process from one that got its number later. ``beats``
    counts: ranks go in step, so the one with fewer is behind. ``at`` is the node's monotonic clock in seconds.
    """

    pid: int
    began: int
    beats: int
    iteration: int
    phase: str
    code: int
    at: float


class Pulse:
    """The writer's side."""

    def __init__(self, folder: Path, rank: int) -> None:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        self._file = os.open(path_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._process = f"{os.getpid()} {began(os.getpid())}"
        self._beats = self._iteration = 0

    def beat(self, phase: str, iteration: int | None = None, code: int = 0) -> None:
        """Notes where the rank is now; ``iteration`` is the last one that is finished, and stays where left out."""
        self._beats += 1
        self._iteration = self._iteration if iteration is None else iteration
        line = f"{self._process} {self._beats} {self._iteration} {phase} {code} {time.monotonic():.3f}"
        with suppress(OSError):  # a full disk is for the checkpoint to tell
            os.pwrite(self._file, f"{line:<{_SIZE - 1}}\n".encode(), 0)


_current: Pulse | None = None


def start(folder: Path, rank: int) -> None:
    """Makes this process a rank of the run in ``folder``."""
    global _current  # one process, one rank: the training loops of three engines reach it without being handed it
    _current = Pulse(folder, rank)
    _current.beat(START)


def beat(phase: str, iteration: int | None = None, code: int = 0) -> None:
    """:meth:`Pulse.beat` of this process; nothing where it is no rank of a run."""
    if _current is not None:
        _current.beat(phase, iteration, code)


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank's pulse lies."""
    return folder / FOLDER / f"rank-{rank}"


def ranks(folder: Path) -> list[int]:
    """The ranks that have a pulse on this node."""
    return sorted(int(path.name.removeprefix("rank-")) for path in (folder / FOLDER).glob("rank-*"))


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks at :data:`STACKS_SIGNAL`."""
    return folder / FOLDER / f"stacks-{rank}"


def read(folder: Path, rank: int) -> Beat | None:
    """The rank's last beat; None where it has none yet, or is just writing it."""
    try:
        pid, began_, beats, iteration, phase, code, at = path_of(folder, rank).read_bytes()[:_SIZE].decode().split()
        return Beat(int(pid), int(began_), int(beats), int(iteration), phase, int(code), float(at))
    except (OSError, ValueError):
        return None


def began(pid: int) -> int:
    """When a process began, in clock ticks since the boot (proc(5), field 22)."""
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
