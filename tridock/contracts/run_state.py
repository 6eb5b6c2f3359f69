"""The state of a run, as its folder shows it.

A run's supervisor holds a lock on ``.supervisor`` as long as it lives. A run with neither a held lock nor an exit code
is lost. This needs no pid, which a restarted container could reuse.
"""

import fcntl
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from tridock.contracts import run_folder
from tridock.contracts.events import Event, append_event

LOCK: Final = ".supervisor"


class RunState(StrEnum):
    """Every state of a run. If nodes disagree, the later member counts: only the head knows more than ``ready``.

    One that is ``incomplete`` is being launched, or its launch was killed. A run that is ``ready`` everywhere and has
    processes somewhere is ``running``: its head was not asked.
    """

    INCOMPLETE = "incomplete"
    READY = "ready"
    LOST = "lost"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    FAILED = "failed"
    DONE = "done"
    RUNNING = "running"

    @property
    def is_active(self) -> bool:
        """Whether a supervisor runs it."""
        return self is RunState.RUNNING

    @property
    def is_over(self) -> bool:
        """Whether it was started and has ended, with or without success."""
        return self not in (RunState.INCOMPLETE, RunState.READY, RunState.RUNNING)

    @property
    def has_failed(self) -> bool:
        """Whether there is a failure to explain."""
        return self in (RunState.FAILED, RunState.LOST)

    @property
    def precedence(self) -> int:
        """Orders the answers of several nodes; the highest counts."""
        return list(RunState).index(self)

    @classmethod
    def of_exit_code(cls, code: int) -> Self:
        """The state of a run that left this exit code."""
        known = {0: cls.DONE, run_folder.EXIT_STOPPED: cls.STOPPED, run_folder.EXIT_PREEMPTED: cls.PREEMPTED}
        return known.get(code, cls.FAILED)


def state_of(folder: Path) -> RunState:
    """The state of the run in ``folder``, as this node sees it."""
    code = exit_code_of(folder)
    if code is not None:
        return RunState.of_exit_code(code)
    if is_supervised(folder):
        return RunState.RUNNING
    if (folder / LOCK).exists():
        return RunState.LOST
    return RunState.INCOMPLETE if (folder / run_folder.INCOMPLETE).exists() else RunState.READY


def is_supervised(folder: Path) -> bool:
    """Returns whether a living supervisor holds the run's lock."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)  # the disk may be read-only
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # A shared lock: two readers at the same moment must not take each other for the supervisor.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def mark_stopped(folder: Path) -> None:
    """Asks the supervisor to end the run. Does nothing on a node without the run's folder."""
    if folder.is_dir() and not (folder / run_folder.EXIT_CODE).exists():
        is_new = not (folder / run_folder.STOPPED).exists()
        (folder / run_folder.STOPPED).touch()
        if is_new:
            append_event(folder, Event.RUN_STOPPED)


def wait_for_end(folder: Path, timeout_s: float) -> None:
    """Waits until the supervisor, if any, has recorded the end of a run whose processes are gone."""
    deadline = time.monotonic() + timeout_s
    while is_supervised(folder) and exit_code_of(folder) is None and time.monotonic() < deadline:
        time.sleep(0.02)


def exit_code_of(folder: Path) -> int | None:
    """Returns the run's exit code, or None while it is missing or unreadable."""
    try:
        return int(run_folder.read_text(folder / run_folder.EXIT_CODE))
    except ValueError:
        return None
