"""Logs with a limit: what a long log has moves to ``NAME.1``, in place of what was there.

It is copied, and the log emptied: its writers have it open, and append. What they write in the moment between the two
is lost.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

RANK_BYTES: Final = 64 << 20
"""Of a log that alone has some output; beyond that it is rotated."""
COPY_BYTES: Final = 16 << 20
"""Of a log that repeats what others have."""
_CHUNK: Final = 1 << 20


def earlier(log: Path) -> Path:
    """Returns where the earlier part of a log is, if there is one."""
    return log.with_name(f"{log.name}.1")


def rotate(log: Path, most: int) -> None:
    """Rotates a log of more than ``most`` bytes; its first line then says so.

    Raises :class:`OSError`, as on a full disk; the log is then as it was.
    """
    part = earlier(log)
    new = part.with_name(f"{part.name}.new")
    if not log.is_file() or log.stat().st_size <= most:
        return
    try:
        with log.open("r+b", buffering=0) as file, new.open("wb") as copy:
            while chunk := file.read(_CHUNK):
                copy.write(chunk)
                copy.flush()
            file.truncate(0)
        new.replace(part)
    finally:
        new.unlink(missing_ok=True)
    with log.open("ab", buffering=0) as file:
        file.write(f"tridock: earlier output is in {part.name}; what is older is removed\n".encode())


class GrowingLog:
    """Reads a log while it grows and is rotated: all of it, or what comes after byte ``offset`` of it as it is now."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path: Final = path
        self._offset = offset
        self._part = _identity(earlier(path)) if offset else None

    def read(self, most: int) -> bytes:
        """Returns the next bytes, at most so many; none if there are none yet."""
        if (part := _identity(earlier(self.path))) != self._part:
            if rest := _read(earlier(self.path), self._offset, most):
                self._offset += len(rest)
                return rest
            self._part, self._offset = part, 0
        new = _read(self.path, self._offset, most)
        if _identity(earlier(self.path)) != part:  # rotated meanwhile
            return self.read(most)
        self._offset += len(new)
        return new


def tail(log: Path, most: int, first: int = 0) -> bytes:
    """Returns the last bytes of a log, at most ``most``, and none from before it had ``first`` bytes."""
    size, part = _size(log), earlier(log)
    end = _read(log, max(first if size >= first else 0, size - most), most)
    if first and size >= first:
        return end
    room = most - len(end)
    return _read(part, max(first, _size(part) - room), room) + end


def _read(path: Path, offset: int, most: int) -> bytes:
    with suppress(FileNotFoundError):
        if path.is_file():  # a FIFO has no end
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read(most) or b""
    return b""


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return 0, 0
