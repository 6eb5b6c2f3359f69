"""Waits for the lock of an open file (flock), never without a limit, and names who holds it."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.05
_PROC_LOCKS: Final = Path("/proc/locks")


def wait_for_lock(descriptor: int, where: object, seconds: float, todo: str = "") -> None:
    """Locks an open file, which ``where`` names.

    Raises :class:`RequestError` with its holder if another process has it for so many seconds, and :class:`OSError`
    where the file system has no locks.
    """
    for _ in range(round(seconds / _POLL_S)):  # not by the clock: this process may be stopped meanwhile
        if try_lock(descriptor):
            return
        time.sleep(_POLL_S)
    if try_lock(descriptor):
        return
    from tridock.errors import Problem, RequestError  # not where a program's older Python waits

    todo = todo or "see what it does (ps -fp PID); it lets go when it ends"
    raise RequestError(Problem(str(where), f"is locked for more than {seconds:g} s", holder_of(descriptor), todo))


def try_lock(descriptor: int) -> bool:
    """Locks an open file if no other has it locked; returns whether it did."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder_of(descriptor: int) -> str:
    """Returns the process of this machine that has an open file locked, or that it is unknown here."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError):
        for pid in re.findall(rf"FLOCK .* (\d+) {place} ", _PROC_LOCKS.read_text()):
            words = b""
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
            return f"process {pid}" + (f" ({os.fsdecode(words)[:200]})" if words else "")
    return "a process that is not seen from here"
