"""Whether a run goes on, and how it ended: what anybody can see in its folder.

Its supervisor holds a lock on ``.supervisor`` as long as it lives: whoever finds neither the lock held nor an exit code
knows that the run was lost, with no process number that a restarted container could have given away again.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.events import append_event

LOCK: Final = ".supervisor"


def is_supervised(folder: Path) -> bool:
    """Whether the run's supervisor lives."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        # Shared: two who look at the same moment must not take each other for the supervisor.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def mark_stopped(folder: Path) -> None:
    """Lets the supervisor know that the end of the run is wanted; a node without the folder has nothing to tell."""
    if folder.is_dir() and not (folder / run_folder.EXIT_CODE).exists():
        (folder / run_folder.STOPPED).touch()
        append_event(folder, "run_stopped")


def wait_for_end(folder: Path, timeout_s: float) -> None:
    """Waits until the supervisor, where there is one, has recorded the end of a run whose processes are gone."""
    deadline = time.monotonic() + timeout_s
    while is_supervised(folder) and exit_code_of(folder) is None and time.monotonic() < deadline:
        time.sleep(0.02)


def exit_code_of(folder: Path) -> int | None:
    """The run's exit code, or None while there is none."""
    try:
        return int((folder / run_folder.EXIT_CODE).read_text())
    except FileNotFoundError:
        return None
