"""Finds the files of ``--input``, decompresses them by their content, and reads chunks of whole lines."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import numpy as np

from tridock.data.dataset.manifest import Input
from tridock.data.digest import SUMS, Digest, sha256_of
from tridock.errors import Problem, RequestError

STDIN: Final = "-"
_COMPRESSED: Final = (".gz", ".bgz", ".zst", ".zstd", ".bz2", ".xz")
_BLOCK: Final = 1 << 18
_TODO_INPUT: Final = "give files, folders or patterns that exist, or - for standard input"


class Kind(StrEnum):
    JSONL = "jsonl"
    TEXT = "text"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """One input. ``path`` is None for standard input, whose size is unknown."""

    name: str
    path: Path | None
    kind: Kind
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of one source; the last line of a source may lack its newline.

    ``position`` counts the bytes read from disk in this source. ``offset`` and ``digest`` (SHA-256) cover the
    (decompressed) lines up to the end of the chunk. ``finished`` ends a source. ``broken`` is why reading failed;
    ``data`` is then the truncated line. ``plain``: the lines are in an uncompressed file at ``offset - len(data)``.
    """

    source: Source
    number: int
    first_line: int
    data: bytes
    lines: int
    offset: int
    digest: Future[str]
    position: int
    finished: Input | None = None
    broken: Problem | None = None
    plain: bool = False


def find_sources(inputs: Sequence[str], kind: Kind | None = None, default: Kind = Kind.JSONL) -> tuple[Source, ...]:
    """Returns the inputs in the order given; the files of a folder or pattern sorted by name, without hidden ones.

    ``kind`` is that of every input but Parquet files. Without it the file name decides; ``default`` is the kind where
    the name does not tell. Raises :class:`RequestError` with every input that does not exist.
    """
    sources: list[Source] = []
    problems: list[Problem] = []
    for given in inputs:
        if given == STDIN:
            sources.append(Source("standard input", None, kind or default))
            continue
        paths = _paths(given)
        if not paths:
            problems.append(Problem(given, "names no file", "", _TODO_INPUT))
        for path in paths:
            try:
                size = path.stat().st_size
                # Only of files: reading from a pipe would consume it.
                parquet = path.is_file() and _compression(_starts(path)) == "parquet"
            except OSError as error:
                problems.append(Problem(str(path), "cannot be read", error.strerror or str(error), _TODO_INPUT))
                continue
            found = Kind.PARQUET if parquet else kind or kind_of_name(path.name, default)
            sources.append(Source(str(path), path, found, size))
    if sum(source.path is None for source in sources) > 1:
        problems.append(Problem("--input", "names standard input more than once", "", "give - once"))
    if problems:
        raise RequestError(problems)
    return tuple(sources)


def _paths(given: str) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and file.name != SUMS]
        return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if path.exists():
        return [path]
    return sorted(Path(name) for name in glob.glob(given, recursive=True) if Path(name).is_file())  # noqa: PTH207  absolute patterns


def _starts(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(6)


def kind_of_name(name: str, otherwise: Kind) -> Kind:
    """Returns the kind by the suffix before that of a compression, or ``otherwise``."""
    path = Path(name.lower())
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    if suffix in (".txt", ".text"):
        return Kind.TEXT
    return Kind.JSONL if suffix in (".jsonl", ".json", ".ndjson") else otherwise


class _CountingReader(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = 0
        self.digest = Digest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.bytes += len(data)
        self.digest.update(data)
        return len(data)

    def drain(self) -> None:
        """Reads what a decompressor left, so that the hash covers the whole file."""
        while self.read(1 << 20):
            pass


class _ZstdReader(io.RawIOBase):
    """Reads zstd frames one after another. Unlike the library's reader it detects a truncated frame."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._new = zstandard.ZstdDecompressor().decompressobj
        self._file = file
        self._frame = self._new()
        self._started = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._started = self._new(), False
            data = data or self._file.read(1 << 17)
            if not data:
                if self._started:
                    raise EOFError("the last zstd frame is truncated")
                return 0
            self._started = True
            self._ready = self._frame.decompress(data)
        taken, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


_TODO_ZSTD: Final = "pip install 'tridock[data]', or decompress it: zstd -dc FILE | tridock data preprocess --input - …"
_TODO_PARQUET: Final = "pip install 'tridock[data]', or give JSON lines"

_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
}


def _compression(start: bytes) -> str | None:
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def _decompressed(source: Source, file: Any) -> Any:
    match _compression(file.peek(6)):
        case "gzip":
            return gzip.GzipFile(fileobj=file)  # needs no more memory than a block
        case "bzip2":
            return bz2.BZ2File(file)
        case "xz":
            return lzma.LZMAFile(file)
        case "zstd":
            try:
                return io.BufferedReader(_ZstdReader(file), 1 << 17)
            except ImportError:
                what = "is compressed by zstd, but a package for it is missing"
                raise RequestError(Problem(source.name, what, "", _TODO_ZSTD)) from None
        case "parquet":
            todo = "give the file's path: parquet cannot be read from a pipe"
            raise RequestError(Problem(source.name, "is parquet", "", todo))
    return file


def _damage() -> tuple[type[Exception], ...]:
    """Returns the exceptions of reading a damaged file."""
    known: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, lzma.LZMAError)
    try:
        from zstandard import ZstdError
    except ImportError:
        return known
    return (*known, ZstdError)


def _problem(source: Source, line: int, error: Exception) -> Problem:
    where = f"{source.name}:{line}"
    todo = "copy or compress the file again, or keep what can be read with --on-error skip --rejects FILE"
    if isinstance(error, EOFError):
        return Problem(where, "the file ends inside its compressed data", "", todo)
    return Problem(where, "the rest of the file cannot be read", str(error), todo)


def read_chunks(number: int, source: Source, keys: Sequence[str], size: int) -> Iterator[Chunk]:
    """Yields the lines of a source in chunks of about ``size`` bytes; the last chunk has ``finished``.

    ``number`` is the index of the source. Needs memory for a chunk and the longest line.
    """
    if source.path is not None and source.kind is not Kind.PARQUET and _is_plain(source.path):
        return _plain_chunks(number, source, source.path, size)
    blocks: _Parquet | _Stream = _Parquet(source, keys) if source.kind is Kind.PARQUET else _Stream(source)
    return _chunks_of_blocks(number, source, blocks, size)


def _is_plain(path: Path) -> bool:
    """Whether a path is an uncompressed file. A file that cannot be read fails when it is opened."""
    try:
        return path.is_file() and _compression(_starts(path)) is None
    except OSError:
        return False


def _plain_chunks(number: int, source: Source, path: Path, size: int) -> Iterator[Chunk]:
    line, offset, content = 1, 0, Digest()
    try:
        with path.open("rb", buffering=0) as file:
            before = _identity(file)
            while data := _lines_at(file.fileno(), offset, size):
                if _identity(file) != before:
                    raise changed(source)
                first, lines = line, _newlines(data) + (data[-1:] != b"\n")
                line, offset = line + lines, offset + len(data)
                content.update(data)
                yield Chunk(source, number, first, data, lines, offset, content.mark(), offset, plain=True)
            if _identity(file) != before:
                raise changed(source)
    except OSError as error:
        raise _unreadable(source, error) from None
    facts = Input(name=path.name, bytes=offset, sha256=content.hexdigest())
    yield Chunk(source, number, line, b"", 0, offset, content.mark(), offset, facts)


def _lines_at(file: int, offset: int, size: int) -> bytes:
    """Returns whole lines from ``offset`` on: at most ``size`` bytes, or one longer line; b"" at the end."""
    data = os.pread(file, size, offset)
    if len(data) < size:
        return data
    if cut := data.rfind(b"\n") + 1:
        return data[:cut]
    parts = [data]
    while data := os.pread(file, size, offset := offset + len(data)):
        cut = data.find(b"\n") + 1
        parts.append(data[: cut or None])
        if cut:
            break
    return b"".join(parts)


def _newlines(data: bytes) -> int:
    """``data.count(b"\\n")`` in a third of the time; in blocks, because a line may be long."""
    characters = np.frombuffer(data, np.uint8)
    blocks = range(0, len(data), _BLOCK)
    return sum(int(np.count_nonzero(characters[start : start + _BLOCK] == ord("\n"))) for start in blocks)


def _identity(file: IO[bytes]) -> tuple[int, int]:
    """Returns what changes when the file is written to."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def lines_of(chunk: Chunk) -> tuple[str, int, int]:
    """Returns file, first byte and size of the lines of a plain chunk."""
    return str(chunk.source.path), chunk.offset - len(chunk.data), len(chunk.data)


def changed(source: Source) -> RequestError:
    """Returns the error for an input that was written to while it was read."""
    todo = "stop all writers, and start from the beginning"
    return RequestError(Problem(source.name, "changed while it was read", "", todo))


def _unreadable(source: Source, error: OSError) -> RequestError:
    got = error.strerror or str(error)
    return RequestError(Problem(source.name, "cannot be read", got, _TODO_INPUT))


def _chunks_of_blocks(number: int, source: Source, blocks: _Parquet | _Stream, size: int) -> Iterator[Chunk]:
    line, offset, content, rest, held = 1, 0, Digest(), [b""], 0

    def chunk(data: bytes, finished: Input | None = None, broken: Problem | None = None) -> Chunk:
        nonlocal line, offset
        first, lines = line, _newlines(data) + (data[-1:] not in (b"", b"\n"))
        line, offset = line + lines, offset + len(data)
        content.update(data)
        position = blocks.position()
        return Chunk(source, number, first, data, lines, offset, content.mark(), position, finished, broken)

    try:
        for block in blocks.read(size):
            rest.append(block)
            held += len(block)
            cut = block.rfind(b"\n") + 1
            if cut and held >= size:
                rest[-1] = block[:cut]
                yield chunk(b"".join(rest))
                rest, held = [block[cut:]], len(block) - cut
    except _damage() as error:
        data = b"".join(rest)
        cut = data.rfind(b"\n") + 1
        if cut:
            yield chunk(data[:cut])
        yield chunk(data[cut:], broken=_problem(source, line, error))
        rest = []
    if any(rest):
        yield chunk(b"".join(rest))
    yield chunk(b"", finished=blocks.facts())


class _Stream:
    """Decompressed blocks of a file or of standard input."""

    def __init__(self, source: Source) -> None:
        self._source = source
        try:
            opened = sys.stdin.buffer if source.path is None else source.path.open("rb", buffering=0)
        except OSError as error:
            raise _unreadable(source, error) from None
        self._counted = _CountingReader(cast("BinaryIO", opened))
        self._is_file = source.path is not None
        self._opened = opened

    def read(self, size: int) -> Iterator[bytes]:
        raw = io.BufferedReader(self._counted, 1 << 17)
        stream = _decompressed(self._source, raw)
        # read1, not read: it returns the bytes before damage first.
        step = max(1, min(size, 1 << 18))
        while block := stream.read1(step):
            yield block

    def position(self) -> int:
        return self._counted.bytes

    def facts(self) -> Input:
        self._counted.drain()
        if self._is_file:
            self._opened.close()
        name = self._source.path.name if self._source.path else self._source.name
        return Input(name=name, bytes=self._counted.bytes, sha256=self._counted.digest.hexdigest())


class _Parquet:
    """Rows of a Parquet file as JSON lines: messages call a row a line."""

    def __init__(self, source: Source, keys: Sequence[str]) -> None:
        try:
            from pyarrow import parquet
        except ImportError:
            raise RequestError(
                Problem(source.name, "is parquet, but a package for it is missing", "", _TODO_PARQUET)
            ) from None
        assert source.path is not None  # Parquet from standard input is refused
        self._source = source
        self._path = source.path
        try:
            self._file = parquet.ParquetFile(source.path)
        except Exception as error:  # pyarrow raises many types
            todo = "copy the file again"
            raise RequestError(Problem(source.name, "is not valid Parquet", str(error), todo)) from None
        names = self._file.schema_arrow.names
        if absent := [key for key in keys if key not in names]:
            got = f"the columns {', '.join(names)}"
            todo = "name columns of text with --json-keys"
            raise RequestError([Problem(source.name, f"has no column {key!r}", got, todo) for key in absent])
        self._columns = list(dict.fromkeys(keys))
        self._done = 0

    def read(self, _size: int) -> Iterator[bytes]:
        """Yields batches of rows, because their size in bytes is unknown beforehand."""
        try:
            for batch in self._file.iter_batches(batch_size=256, columns=self._columns):
                rows = batch.to_pylist()
                # A value that JSON lacks becomes an object, which is not a text: the row is rejected.
                yield b"".join(
                    json.dumps(row, default=lambda value: {"value": repr(value)}).encode() + b"\n" for row in rows
                )
                self._done += len(rows)
        except ValueError as error:  # pyarrow's for damaged pages, Python's for text that is not UTF-8
            raise OSError(str(error)) from error

    def position(self) -> int:
        rows: int = self._file.metadata.num_rows
        return self._source.bytes * self._done // max(rows, 1)

    def facts(self) -> Input:
        return Input(name=self._path.name, bytes=self._source.bytes, sha256=sha256_of(self._path))
