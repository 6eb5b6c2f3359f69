"""Ctrl-C outside a command: while modules load, and while the process ends. Exit code 130, and no traceback.

Imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ANSWER = b"interrupted\n"
_EXIT_INTERRUPTED = 130
"""As in tridock.errors, whose import takes time."""


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, _ANSWER)
    os._exit(_EXIT_INTERRUPTED)


def end_at_once() -> None:
    """Ctrl-C ends this process at once from now on. Call it first. Does nothing where Ctrl-C is ignored (``nohup``)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def raised() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt inside, so that a command can clean up; ``end_at_once`` holds again afterwards."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, _end)
