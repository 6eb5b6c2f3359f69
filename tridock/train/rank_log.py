"""Each rank's standard output and error also go to ``<run>/logs/rank-<N>.log``.

File descriptors 1 and 2 become a pipe, so what native code writes (Gloo, NCCL, an abort's last words) is kept too.
A forked child copies the pipe to the log and to the original stream. A thread of this process could not: it would die
with the rank, and take with it the very lines that say why.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tridock.run_folder import rank_log

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


class RankLog:
    """The copy in progress. ``close()`` returns once everything written so far has reached both places."""

    def __init__(self, child: int, original: int) -> None:
        self._child, self._original = child, original

    @classmethod
    def open(cls, run_folder: Path, rank: int) -> RankLog:
        """Starts copying. To be called before any thread starts: it forks."""
        path = run_folder / rank_log(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        # Whoever stops the rank signals its children as well; the copy ends by itself when the rank has. The signals
        # are held back until the child ignores them, lest one come in between.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        child = os.fork()
        if child == 0:
            for number in _IGNORED:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(write_end)
            _copy(read_end, (1, log))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read_end)
        os.close(log)
        original = os.dup(1)
        os.set_inheritable(original, False)
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.close(write_end)
        # Python buffers whole blocks on a pipe; progress has to be seen when it happens.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        return cls(child, original)

    def close(self) -> None:
        """Gives the streams back and waits for the copy to end."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._original, 1)
        os.dup2(self._original, 2)
        os.close(self._original)
        os.waitpid(self._child, 0)


def _copy(source: int, targets: tuple[int, ...]) -> None:
    """Copies until the last writer has gone; a target that fails (disk full, terminal gone) is dropped alone."""
    alive = list(targets)
    try:
        while chunk := os.read(source, 65536):
            for target in list(alive):
                try:
                    _write_all(target, chunk)
                except OSError:
                    alive.remove(target)
    finally:
        os._exit(0)


def _write_all(target: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(target, chunk) :]
