"""The launcher's and the ranks' logs on this node, whole or followed until the run ends.

For a remote reader of the output, each NUL in it is doubled, BEAT is a keepalive, and END marks its end.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.lease import newest
from tridock.contracts.rotated_logs import GrowingLog
from tridock.contracts.run_state import exit_code_of, is_supervised
from tridock.contracts.supervision import Supervision
from tridock.errors import Problem, RequestError, RunError, TridockError
from tridock.node.agent.processes import find_processes
from tridock.node.progress_lines import ProgressLines

_POLL_S: Final = 0.05
_CHUNK: Final = 1 << 16
_RANK_POLL_S: Final = 0.2
_SEARCH_S: Final = 1.0
_TAKEOVER_S: Final = 90.0
"""Seconds in which another supervisor must take over a run that can be taken over."""
_START_S: Final = 120.0
"""Seconds in which a newly launched run must start on this node."""


def follow_with_keepalive(folder: Path, offset: int) -> int:
    """Like :func:`follow`, with BEAT and END for ``fab``; errors are part of the output."""
    try:
        code = follow(folder, offset, marked=True)
    except TridockError as error:
        _write(f"{error}\n".encode())
        code = error.exit_code
    _write(run_folder.END)  # not of an end by a signal, or by an error of its disk
    return code


def follow(folder: Path, offset: int = 0, *, marked: bool = False) -> int:
    """Prints ``launcher.log`` from byte ``offset`` until the run has ended; returns the run's exit code.

    ``marked``: with BEAT, for :func:`follow_with_keepalive`.

    Raises :class:`RequestError` if there is no log, and :class:`RunError` if the run's supervisor is gone.
    """
    if not (folder / run_folder.LAUNCHER_LOG).is_file():
        raise RequestError(Problem(folder.name, "has no output here", str(folder), "see tridock status for the runs"))
    log = GrowingLog(folder / run_folder.LAUNCHER_LOG, offset)
    last_output = last_alive = time.monotonic()
    may_be_taken_over = newest(folder) and Supervision.read(folder).may_be_taken_over
    patience = _TAKEOVER_S if may_be_taken_over else 0.0
    while True:
        # Checked before the log is read, so that output written before the end is included.
        alive, code = is_supervised(folder), exit_code_of(folder)
        while chunk := log.read(_CHUNK):
            _write(chunk.replace(b"\0", b"\0\0") if marked else chunk)
            last_output = time.monotonic()
        if marked and time.monotonic() - last_output >= run_folder.BEAT_S:
            _write(run_folder.BEAT)
            last_output = time.monotonic()
        if code is not None:
            return code
        if alive:
            last_alive = time.monotonic()
        elif exit_code_of(folder) is None and time.monotonic() - last_alive >= patience:
            todo = "its node or its supervisor was ended; continue it with tridock resume, or launch again"
            raise RunError(
                Problem(folder.name, "was lost: nothing supervises it and no exit code was written", "", todo)
            )
        time.sleep(_POLL_S)


def _write(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def show_rank_logs(folder: Path, ranks: Sequence[int], *, follow: bool, prefix: bool) -> int:
    """Prints the logs of ranks one after another, or with ``follow`` line by line as they grow; returns 0.

    ``prefix`` puts ``rank N: `` before each line. Raises :class:`RequestError` for logs that are missing.
    """
    tails = [_Tail(folder, rank, prefix, follow=follow) for rank in ranks]
    missing = [tail for tail in tails if not tail.log.path.is_file()]
    if missing and not follow:
        todo = "it may not have started, or on another node: see tridock status"
        raise RequestError(
            Problem(f"rank {tail.rank}", "has no log here", str(tail.log.path), todo) for tail in missing
        )
    run = _RunHere(folder)
    while True:
        # Checked before the logs are read, so that output written before the end is included.
        ended = not follow or run.has_ended(any(tail.log.path.is_file() for tail in tails))
        for tail in tails:
            tail.print_new(is_last=ended)
        sys.stdout.buffer.flush()
        if ended:
            return 0
        time.sleep(_RANK_POLL_S)


class _Tail:
    """One rank's log, and the line of it that is not printed yet."""

    def __init__(self, folder: Path, rank: int, prefix: bool, *, follow: bool) -> None:
        self.rank, self.log = rank, GrowingLog(folder / run_folder.rank_log(rank))
        self._prefix = f"rank {rank}: ".encode() if prefix else b""
        self._lines = ProgressLines() if prefix or follow else None  # else all of it, byte for byte

    def print_new(self, *, is_last: bool) -> None:
        """Prints new complete lines, as other ranks' lines come between; the last call prints an incomplete one too."""
        while new := self.log.read(_CHUNK):
            self._print(new if self._lines is None else self._lines.add(new))
        if self._lines is not None:
            self._print(self._lines.rest() if is_last else self._lines.state())

    def _print(self, text: bytes) -> None:
        if self._prefix and text:
            text = self._prefix + text.removesuffix(b"\n").replace(b"\n", b"\n" + self._prefix) + b"\n"
        sys.stdout.buffer.write(text)


class _RunHere:
    """Whether the run has ended on this node; without a shared file system only the head has the exit code."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._created = folder, time.monotonic()
        self._searched, self._is_running = 0.0, True

    def has_ended(self, has_logs: bool) -> bool:
        now = time.monotonic()
        if exit_code_of(self._folder) is not None:
            return True
        if now - self._searched >= _SEARCH_S:  # the search reads all of /proc
            self._searched = now
            self._is_running = is_supervised(self._folder) or bool(find_processes(self._folder.name))
        return not self._is_running and (has_logs or now - self._created > _START_S)
