"""Handles Ctrl-C outside a command, while modules load and while the process exits: exit code 130, no traceback.

Imports nothing slow.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ANSWER = b"interrupted\n"
_EXIT_INTERRUPTED = 130
"""Equals the constant in tridock.errors, which is slow to import."""
_ONE_S = 0.5
"""Seconds in which a second Ctrl-C counts as the same one: it would come between the first and the cleanup."""


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, _ANSWER)
    os._exit(_EXIT_INTERRUPTED)


def end_at_once() -> None:
    """Makes Ctrl-C end this process at once. Call it first. Does nothing if Ctrl-C is ignored (``nohup``)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def raised() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt inside the block, for cleanup; afterwards it ends the process again."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    raised_at = -_ONE_S

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal raised_at
        if time.monotonic() >= raised_at + _ONE_S:
            raised_at = time.monotonic()
            raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupt)
        yield
    finally:
        signal.signal(signal.SIGINT, _end)
