"""Copies each rank's standard output and error to ``<run>/logs/rank-<N>.log``.

File descriptors 1 and 2 become a pipe, so the log also has what native code writes (Gloo, NCCL, an abort). A forked
child copies the pipe to the log and to the original stream. A thread of this process would die with the rank, before
it had copied the lines that explain the failure.
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

from tridock.contracts.appends import NO_ROOM
from tridock.contracts.run_folder import rank_log

CLOSE_LIMIT_S = 3.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1)
# Makes the child finish with the content of the pipe. No launcher sends it; Slurm's --signal reaches children too.
_FINISH = signal.SIGRTMIN
_CHUNK = 1 << 16
_TICK_S = 0.02


class RankLog:
    """The copy in progress. ``close()`` returns once everything written so far has reached both targets."""

    def __init__(self, child: int, original: int) -> None:
        self._child, self._original = child, original

    @classmethod
    def open(cls, run_folder: Path, rank: int) -> RankLog:
        """Starts copying. Call it before any thread starts: it forks."""
        path = run_folder / rank_log(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        # A signal that stops the rank also reaches the child, which must end after the rank: signals are blocked until
        # the child ignores them.
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
        # Python buffers blocks on a pipe; progress must be visible at once.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        return cls(child, original)

    def close(self) -> None:
        """Restores the streams and waits for the copy to end.

        A leftover process of the rank may keep the pipe open: after ``CLOSE_LIMIT_S`` seconds the copy ends with the
        output so far.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._original, 1)
        os.dup2(self._original, 2)
        os.close(self._original)
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while os.waitpid(self._child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                # Signals repeatedly: Python handles a signal that arrives just before a read only after that read.
                os.kill(self._child, _FINISH)
            time.sleep(_TICK_S)


class _Copy:
    """The child process: copies until the last writer has closed the pipe, or until ``finish``."""

    def __init__(self, source: int, targets: tuple[int, ...]) -> None:
        self._source, self._alive = source, list(targets)
        self._lost = dict.fromkeys(targets, 0)  # bytes that did not fit on the disk
        self._remaining: int | None = None  # bytes still to copy, once ``finish`` has set them

    def finish(self, *_: object) -> None:
        """Signal handler: copies only the current content of the pipe, even if a process still writes to it."""
        if self._remaining is None:
            size = fcntl.ioctl(self._source, termios.FIONREAD, bytes(4))
            self._remaining = int.from_bytes(size, sys.byteorder)
            os.set_blocking(self._source, False)  # Python retries the read that this signal interrupted; it now returns

    def run(self) -> NoReturn:
        """Copies, then ends the process."""
        try:
            # Checked before each read: a limit that a signal sets later does not count this read.
            while (remaining := self._remaining) != 0:
                chunk = os.read(self._source, _CHUNK if remaining is None else min(remaining, _CHUNK))
                if not chunk:
                    break
                if remaining is not None:
                    self._remaining = remaining - len(chunk)
                self._write(chunk)
        except BlockingIOError:
            pass  # finish was called, and the pipe is empty
        finally:
            os._exit(0)

    def _write(self, chunk: bytes) -> None:
        """Writes to every target. Later reports the bytes that a full disk missed; drops a target that is closed."""
        for target in list(self._alive):
            lost = self._lost[target]
            missed = b"\n[%d bytes did not fit on the disk]\n" % lost if lost else b""
            try:
                rest = _write_all(target, missed + chunk)
            except OSError:
                self._alive.remove(target)
                continue
            self._lost[target] = (lost if len(rest) > len(chunk) else 0) + min(len(rest), len(chunk))


def _write_all(target: int, data: bytes) -> bytes:
    """Writes the data; returns the bytes that did not fit on a full disk."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except OSError as error:
            if error.errno in NO_ROOM:
                break
            raise
    return data
