"""Decompresses a file by its content. Reads all streams of a file, and treats any damage as an error."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import zstandard

from tridock.errors import Problem, RequestError

_BLOCK: Final = 1 << 17
_ZSTD_INPUT: Final = 1 << 11
"""Bytes of input per call. The zstd package decompresses all of its input at once: 4 bytes can be 128 KiB."""
_LONGEST_WINDOW: Final = 1 << 31
"""zstd's largest window (``--long=31``). A frame needs memory for its own window only."""
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",
    # A skippable frame of zstd: pzstd, and tools that write an index, begin with one.
    **{bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)},
}
_START: Final = max(map(len, _MAGIC))
DAMAGE: Final = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""The exceptions that reading a damaged file raises."""


def compression(start: bytes) -> str | None:
    """Returns the compression (or ``parquet``, ``arrow``) of a file by its first bytes; None for plain text."""
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def compression_of(path: Path) -> str | None:
    """Returns the compression (or ``parquet``, ``arrow``) of a file by its content; None for plain text."""
    with path.open("rb") as file:
        return compression(file.read(_START))


class _Streams(io.RawIOBase):
    """Reads compressed streams one after another, with zeros between them.

    Python's readers of bz2 and xz stop without an error at a damaged later stream, zstd's at a truncated frame.
    ``new`` returns a decompressor of one stream.
    """

    def __init__(self, file: IO[bytes], new: Callable[[], Any]) -> None:
        self._file, self._new = file, new
        self._stream = new()
        self._limited = hasattr(self._stream, "needs_input")
        self._started = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._input()
            if data is None:
                return 0
            self._ready = memoryview(self._stream.decompress(data, *[_BLOCK] * self._limited))
        taken, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _input(self) -> bytes | None:
        """Returns the next compressed bytes, begins a new stream after the end of one; None at the end of the file."""
        data = b""
        if self._stream.eof:
            data = self._stream.unused_data.lstrip(b"\0")
            self._stream, self._started = self._new(), False
        elif not getattr(self._stream, "needs_input", True):
            return data
        while not data:
            data = self._file.read(_BLOCK if self._limited else _ZSTD_INPUT)
            if not data:
                if self._started:
                    raise EOFError("the last compressed stream is truncated")
                return None
            if not self._started:
                data = data.lstrip(b"\0")
        self._started = True
        return data


def decompressed(name: str, file: Any) -> Any:
    """Returns a reader of the decompressed content of a buffered file. ``name`` is for messages."""
    new: Callable[[], Any]
    match compression(file.peek(_START)):
        case None:
            return file
        case "gzip":
            return gzip.GzipFile(fileobj=file)  # needs no more memory than a block
        case "parquet" | "arrow" as kind:
            todo = f"give the file's path: {kind} cannot be read from a pipe"
            raise RequestError(Problem(name, f"is {kind}", "", todo))
        case "bzip2":
            new = bz2.BZ2Decompressor
        case "xz":
            new = lzma.LZMADecompressor
        case "zstd":
            new = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj
    return io.BufferedReader(_Streams(file, new), _BLOCK)
