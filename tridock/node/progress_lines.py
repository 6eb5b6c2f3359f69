"""Lines of output in which a progress bar overwrites its own line, which ends with a carriage return."""

import time
from collections.abc import Callable
from typing import Final

from tridock.contracts import run_folder

INTERVAL_S: Final = 1.0
"""Seconds between two states of a bar."""


class ProgressLines:
    """Makes whole lines of output that comes in parts: of a bar its newest state now and then, and its last one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._rest = now, b""
        self._shown, self._shown_at = b"", float("-inf")

    def add(self, output: bytes) -> bytes:
        """Returns the lines that have become whole, and a bar's state if the last one was some time ago."""
        *lines, rest = (self._rest + output).split(b"\n")
        text = b"".join(map(self._whole, lines))
        bar, _, last = rest.rpartition(b"\r")
        # What came before the newest state is gone, but for the state that a blank one is about to replace.
        self._rest = rest if not bar else b"\r" + (last if last.strip() else _state(bar) + b"\r" + last)
        if len(self._rest) > run_folder.LONGEST_LINE:
            text, self._rest = text + self._rest, b""
        return text + self.state()

    def state(self) -> bytes:
        """Returns a bar's newest state as a line if it is new and the last one was some time ago."""
        if b"\r" not in self._rest or self._now() - self._shown_at < INTERVAL_S:
            return b""
        if not (state := _state(self._rest)) or state == self._shown:
            return b""
        self._shown, self._shown_at = state, self._now()
        return state + b"\n"

    def rest(self) -> bytes:
        """Returns what has come of an incomplete line, at the end of the output."""
        rest, self._rest = self._rest, b""
        return self._whole(rest).removesuffix(b"\n") if rest else b""

    def _whole(self, line: bytes) -> bytes:
        if b"\r" not in line:
            return line + b"\n"
        state, shown, self._shown = _state(line), self._shown, b""
        return b"" if state == shown and shown else state + b"\n"


def _state(line: bytes) -> bytes:
    """Returns what a terminal shows of the line, roughly: the last of its states that is not blank."""
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")
