"""Each rank's standard output and error also go to ``<run>/logs/rank-<N>.log``.

File descriptors 1 and 2 become a pipe, so what native code writes (Gloo, NCCL, an abort's last words) is kept too.
A forked child copies the pipe to the log and to the original stream. A thread of this process could not: it would die
with the rank, and take with it the very lines that say why.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
import time
from pathlib import Path
from typing import NoReturn

from tridock.contracts.run_folder import rank_log

CLOSE_LIMIT_S = 3.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1)
# Tells the child to end with what is in the pipe. One that no launcher sends: Slurm's --signal goes to children too.
_FINISH = signal.SIGRTMIN
_CHUNK = 1 << 16
_TICK_S = 0.02


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
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_IGNORED, _FINISH))
        child = os.fork()
        if child == 0:
            for number in _IGNORED:
                signal.signal(number, signal.SIG_IGN)
            copy = _Copy(read_end, (1, log))
            signal.signal(_FINISH, copy.finish)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(write_end)
            copy.run()
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
        """Gives the streams back and waits for the copy to end.

        A process that the rank started and left behind may hold the pipe for ever: after ``CLOSE_LIMIT_S`` the copy
        ends with what had been written by then, whoever wrote it.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._original, 1)
        os.dup2(self._original, 2)
        os.close(self._original)
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while os.waitpid(self._child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                # More than once: Python sees a signal that comes just before it begins to read only after that read.
                os.kill(self._child, _FINISH)
            time.sleep(_TICK_S)


class _Copy:
    """The child's work: copies until the last writer has gone, or until it is told to finish."""

    def __init__(self, source: int, targets: tuple[int, ...]) -> None:
        self._source, self._alive = source, list(targets)
        self._left: int | None = None  # how much is still to be copied, once that is settled

    def finish(self, *_: object) -> None:
        """A signal's handler: only what is in the pipe now is still copied. A writer without end gets no more."""
        if self._left is None:
            size = fcntl.ioctl(self._source, termios.FIONREAD, bytes(4))
            self._left = int.from_bytes(size, sys.byteorder)
            os.set_blocking(self._source, False)  # the read that this signal interrupted begins again, and ends

    def run(self) -> NoReturn:
        """Copies, and ends the process."""
        try:
            # Looked at before each read: what a signal settles after that, no part of this read counts against.
            while (left := self._left) != 0:
                chunk = os.read(self._source, _CHUNK if left is None else min(left, _CHUNK))
                if not chunk:
                    break
                if left is not None:
                    self._left = left - len(chunk)
                self._write(chunk)
        except BlockingIOError:
            pass  # told to finish, and nothing is left
        finally:
            os._exit(0)

    def _write(self, chunk: bytes) -> None:
        """To every target; one that fails (disk full, terminal gone) is dropped alone."""
        for target in list(self._alive):
            try:
                _write_all(target, chunk)
            except OSError:
                self._alive.remove(target)


def _write_all(target: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(target, chunk) :]
