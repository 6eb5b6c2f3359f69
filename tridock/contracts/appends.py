"""Appends to a run's files on a disk that may be full: lines that do not fit wait in memory for the next append."""

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Final

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
