"""Delays Ctrl-C while something is done that must not be left half-done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed() -> Iterator[None]:
    """Handles a Ctrl-C that comes during the block after it. In a thread, to which no signal comes, does nothing.

    Blocking the signal would not help: a library's thread would get it, and Python would still raise KeyboardInterrupt
    in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])
