"""Ends the processes that suites which were killed have left: a loop that waits for its test waits for ever."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

NAME = "TEST_SUITE"
"""In the environment of whatever a suite starts: its process's number and start, as "71 1234567"."""


def _identity(pid: int | str) -> str:
    """A number is used again, but not with the same start. Empty if there is no such process."""
    with suppress(OSError):  # the command's name is in parentheses and may contain any character
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return f"{pid} {fields[19]}"  # proc(5): the 22nd is starttime, and these begin with the third
    return ""


def _lives(suite: str) -> bool:
    return bool(suite) and _identity(suite.partition(" ")[0]) == suite


def mark() -> None:
    """Lets everything that this process starts carry its name, or that of the suite that runs it."""
    if not _lives(os.environ.get(NAME, "")):
        os.environ[NAME] = _identity(os.getpid())


def end_theirs() -> list[int]:
    """Kills what suites that no longer live have started; returns the numbers of those processes."""
    killed = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (entry / "environ").read_text(errors="replace").split("\0")
            suite = next((it.partition("=")[2] for it in variables if it.startswith(f"{NAME}=")), "")
            if suite and not _lives(suite) and entry.name != str(os.getpid()):
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
    return killed
