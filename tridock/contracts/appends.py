"""Appends to a run's files on a disk that may be full: lines that do not fit wait in memory for the next append.

Printed output may go to a file on such a disk, too: what does not fit is dropped, and counted.
"""

import errno
import fcntl
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a full or read-only file system, which may become writable again."""
_KEPT_BYTES: Final = 1 << 20
_RETRY_S: Final = 0.5
_POLL_S: Final = 0.001
_LOCK_S: Final = 1.0
"""Longest wait for another writer, so that a writer suspended with the lock blocks nobody."""

_waiting: dict[Path, bytes] = {}
_lock = threading.Lock()  # the checkpoint thread and the training loop both append


def append(path: Path, data: bytes) -> None:
    """Appends ``data``, complete lines, after any lines still waiting for this file.

    A line is written completely or not at all. At most 1 MiB waits per file; beyond that the oldest lines are dropped.
    """
    with _lock:
        waiting = _waiting.pop(path, b"") + data
        if waiting := waiting[_append(path, waiting) :]:
            _waiting[path] = waiting[-_KEPT_BYTES:].partition(b"\n")[2] if len(waiting) > _KEPT_BYTES else waiting


def flush(patience_s: float) -> bool:
    """Appends waiting lines, for at most ``patience_s`` seconds; returns whether all are written."""
    deadline = time.monotonic() + patience_s
    while True:
        for path in list(_waiting):
            append(path, b"")
        if not _waiting or time.monotonic() >= deadline:
            return not _waiting
        time.sleep(_RETRY_S)


def _append(path: Path, data: bytes) -> int:
    """Appends in one write, so that lines of several processes never mix; returns the number of bytes written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        if error.errno in NO_ROOM:
            return 0
        raise
    try:
        _wait_for_lock(descriptor)  # another writer may be about to truncate its partial line
        if (written := os.write(descriptor, data)) == len(data):
            return written
        whole = data.rfind(b"\n", 0, written) + 1
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - written + whole)
        return whole
    except OSError as error:
        if error.errno in NO_ROOM:
            return 0
        raise
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int) -> None:
    """Locks the open file, or gives up after a short wait; a file server may not support locks."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
        except OSError:
            pass
        return


class _Printed(io.RawIOBase):
    """Writes to a file; drops what does not fit, and says so once there is room again."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._lost = file, 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        try:
            if self._lost:
                self._file.write(b"\n[%d bytes did not fit on the disk]\n" % self._lost)
                self._lost = 0
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._lost += len(rest)
        return len(data)


@contextmanager
def printing_to_a_full_disk() -> Iterator[None]:
    """Lets no full disk interrupt what this process prints inside the block: a run must outlive its log."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        buffer = getattr(stream, "buffer", None)
        if isinstance(file := getattr(buffer, "raw", buffer), io.FileIO):  # without raw: PYTHONUNBUFFERED
            stream.flush()
            printed = _Printed(file)
            options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            whole: Any = printed if buffer is file else io.BufferedWriter(printed)
            setattr(sys, name, io.TextIOWrapper(whole, stream.encoding, stream.errors, **options))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)
