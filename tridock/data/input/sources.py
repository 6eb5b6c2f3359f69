"""Reads inputs in chunks of whole lines."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import numpy as np

from tridock.data.dataset.manifest import Input
from tridock.data.digest import Digest, sha256_of
from tridock.data.input.compression import compression_of, damage, decompressed
from tridock.errors import Problem, RequestError

_BLOCK: Final = 1 << 18
_FIRST_LINE: Final = 1 << 20
_LONGEST_LINE: Final = 256 << 20
"""Maximum bytes of a line, which must fit in memory: a small compressed file may have one of many gigabytes."""
TODO_INPUT: Final = "give files, folders or patterns that exist, or - for standard input"


class Kind(StrEnum):
    """How an input is split into documents."""

    JSONL = "jsonl"
    TEXT = "text"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """One input. ``path`` is None for standard input, whose size is unknown. ``name`` is printable: valid UTF-8."""

    name: str
    path: Path | None
    kind: Kind
    bytes: int = 0

    @property
    def file_name(self) -> str:
        """Name without its folder."""
        return self.name if self.path is None else printable(self.path.name)


def printable(name: str | Path) -> str:
    """Returns a file's name, which may be any bytes, as valid UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a file and its state: differs for another file of the same name, and for a file written to since."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int = field(compare=False)
    """The ``ctime``, which nobody can set back; a new link to the file changes it too."""

    @classmethod
    def of(cls, file: int | Path) -> Identity:
        """Returns the identity of an open file, or of the file that now has this path."""
        found = os.stat(file)  # noqa: PTH116  file descriptors too
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of one source; the last line of a source may lack its newline.

    ``position`` counts the bytes read from disk in this source. ``offset`` and ``digest`` (SHA-256) cover the
    (decompressed) lines up to the end of the chunk. ``finished`` ends a source, whose file last changed at
    ``changed_ns``. ``broken`` is why reading failed; ``data`` is then the truncated line. ``plain``: the lines are at
    ``offset - len(data)`` in this uncompressed file.
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
    changed_ns: int = 0
    broken: Problem | None = None
    plain: Identity | None = None


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
        """Reads the bytes that a decompressor left, so that the hash covers the whole file."""
        while self.read(1 << 20):
            pass


_TODO_PARQUET: Final = "pip install 'tridock[data]', or give JSON lines"


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


def first_line(source: Source) -> bytes:
    """Returns the first line that is not blank, at most a megabyte; b"" for an empty or unreadable file."""
    if source.path is None or not source.path.is_file():
        return b""  # reading from a pipe would consume it
    try:
        with source.path.open("rb") as file:
            start: bytes = decompressed(source.name, file).read(_FIRST_LINE)
            return start.lstrip().partition(b"\n")[0]
    except damage():
        return b""


def _is_plain(path: Path) -> bool:
    """Whether a path is an uncompressed file. A file that cannot be read fails when it is opened."""
    try:
        return path.is_file() and compression_of(path) is None
    except OSError:
        return False


def _plain_chunks(number: int, source: Source, path: Path, size: int) -> Iterator[Chunk]:
    line, offset, content = 1, 0, Digest()
    try:
        with path.open("rb", buffering=0) as file:
            before = Identity.of(file.fileno())
            while data := _lines_at(file.fileno(), offset, size, source, line):
                if Identity.of(file.fileno()) != before:
                    raise changed(source)
                first, lines = line, _newlines(data) + (data[-1:] != b"\n")
                line, offset = line + lines, offset + len(data)
                content.update(data)
                yield Chunk(source, number, first, data, lines, offset, content.mark(), offset, plain=before)
            _check_unchanged(source, file.fileno(), before)
    except OSError as error:
        raise _unreadable(source, error) from None
    facts = Input(name=source.file_name, bytes=offset, sha256=content.hexdigest())
    yield Chunk(source, number, line, b"", 0, offset, content.mark(), offset, facts, before.changed_ns)


def _lines_at(file: int, offset: int, size: int, source: Source, line: int) -> bytes:
    """Returns whole lines from ``offset`` on: at most ``size`` bytes, or one longer line; b"" at the end.

    ``line`` is the number of the first line.
    """
    start = offset
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
        if offset - start > _LONGEST_LINE:
            raise _too_long(source, line)
    return b"".join(parts)


def _too_long(source: Source, line: int) -> RequestError:
    what = f"is longer than {_LONGEST_LINE >> 20} MiB"
    todo = "put each document on a line of its own: jq -c '.[]' FILE does it with a JSON array"
    return RequestError(Problem(f"{source.name}:{line}", what, "", todo))


def _newlines(data: bytes) -> int:
    """Returns ``data.count(b"\\n")`` in a third of its time; works in blocks, because a line may be long."""
    characters = np.frombuffer(data, np.uint8)
    blocks = range(0, len(data), _BLOCK)
    return sum(int(np.count_nonzero(characters[start : start + _BLOCK] == ord("\n"))) for start in blocks)


def lines_of(chunk: Chunk) -> tuple[Identity, int, int]:
    """Returns the file, first byte and size in bytes of a plain chunk's lines."""
    assert chunk.plain is not None
    return chunk.plain, chunk.offset - len(chunk.data), len(chunk.data)


def read_again(source: Source, identity: Identity, offset: int, size: int) -> bytes:
    """Reads the lines of a plain chunk again, in another process."""
    assert source.path is not None
    try:
        with source.path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
            same = len(data) == size and Identity.of(file.fileno()) == identity
    except FileNotFoundError:
        same = False
    except OSError as error:
        raise _unreadable(source, error) from None
    if not same:
        raise changed(source)
    return data


def _check_unchanged(source: Source, opened: int, before: Identity) -> None:
    """Raises :class:`RequestError` if the open file was written to, or if another one has its name now."""
    assert source.path is not None
    try:
        same = Identity.of(opened) == before == Identity.of(source.path)
    except FileNotFoundError:
        same = False
    if not same:
        raise changed(source)


def changed(source: Source) -> RequestError:
    """Returns the error for an input that was written to, or replaced, while it was read."""
    todo = "stop all writers, and start from the beginning"
    return RequestError(Problem(source.name, "changed while it was read", "", todo))


def _unreadable(source: Source, error: OSError) -> RequestError:
    got = error.strerror or str(error)
    return RequestError(Problem(source.name, "cannot be read", got, TODO_INPUT))


def _chunks_of_blocks(number: int, source: Source, blocks: _Parquet | _Stream, size: int) -> Iterator[Chunk]:
    line, offset, content, rest, pending = 1, 0, Digest(), [b""], 0

    def chunk(data: bytes, broken: Problem | None = None) -> Chunk:
        nonlocal line, offset
        first, lines = line, _newlines(data) + (data[-1:] not in (b"", b"\n"))
        line, offset = line + lines, offset + len(data)
        content.update(data)
        position = blocks.position()
        return Chunk(source, number, first, data, lines, offset, content.mark(), position, broken=broken)

    try:
        for block in blocks.read(size):
            rest.append(block)
            pending += len(block)
            cut = block.rfind(b"\n") + 1
            if cut and pending >= size:
                rest[-1] = block[:cut]
                yield chunk(b"".join(rest))
                rest, pending = [block[cut:]], len(block) - cut
            elif pending > size + _LONGEST_LINE:
                raise _too_long(source, line + sum(map(_newlines, rest)))
    except damage() as error:
        data = b"".join(rest)
        cut = data.rfind(b"\n") + 1
        if cut:
            yield chunk(data[:cut])
        yield chunk(data[cut:], broken=_problem(source, line, error))
        rest = []
    if any(rest):
        yield chunk(b"".join(rest))
    yield replace(chunk(b""), finished=blocks.facts(), changed_ns=blocks.changed_ns)


class _Stream:
    """Decompressed blocks of a file or of standard input."""

    def __init__(self, source: Source) -> None:
        self._source = source
        try:
            opened = _standard_input() if source.path is None else source.path.open("rb", buffering=0)
        except OSError as error:
            raise _unreadable(source, error) from None
        self._counted = _CountingReader(cast("BinaryIO", opened))
        self._opened = opened
        self._before = Identity.of(opened.fileno()) if source.path and source.path.is_file() else None
        self.changed_ns = self._before.changed_ns if self._before else 0

    def read(self, size: int) -> Iterator[bytes]:
        raw = io.BufferedReader(self._counted, 1 << 17)
        stream = decompressed(self._source.name, raw)
        # read1, not read: it first returns the bytes before any damage.
        step = max(1, min(size, 1 << 18))
        while block := stream.read1(step):
            yield block

    def position(self) -> int:
        return self._counted.bytes

    def facts(self) -> Input:
        self._counted.drain()
        if self._before is not None:
            _check_unchanged(self._source, self._opened.fileno(), self._before)
        if self._source.path is not None:
            self._opened.close()
        digest = self._counted.digest.hexdigest()
        return Input(name=self._source.file_name, bytes=self._counted.bytes, sha256=digest)


def _standard_input() -> IO[bytes]:
    # None if the caller closed it.
    if sys.stdin is None:
        todo = "give it lines, or name files as --input"
        raise RequestError(Problem("standard input", "is closed", "", todo))
    return sys.stdin.buffer


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
        self._before = Identity.of(source.path)
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
        self.changed_ns = self._before.changed_ns

    def read(self, size: int) -> Iterator[bytes]:
        """Yields batches of rows of about ``size`` bytes together."""
        rows, pending = max(self._file.metadata.num_rows, 1), self._uncompressed_bytes()
        batch_size = max(1, min(256, size * rows // max(pending, 1)))
        try:
            for batch in self._file.iter_batches(batch_size=batch_size, columns=self._columns):
                rows = batch.to_pylist()
                # A value that JSON cannot represent becomes an object, which is not a text: the row is rejected.
                yield b"".join(
                    json.dumps(row, default=lambda value: {"value": repr(value)}).encode() + b"\n" for row in rows
                )
                self._done += len(rows)
        except ValueError as error:  # pyarrow's for damaged pages, Python's for text that is not UTF-8
            raise OSError(str(error)) from error

    def _uncompressed_bytes(self) -> int:
        groups = map(self._file.metadata.row_group, range(self._file.metadata.num_row_groups))
        return sum(group.total_byte_size for group in groups)

    def position(self) -> int:
        rows: int = self._file.metadata.num_rows
        return self._source.bytes * self._done // max(rows, 1)

    def facts(self) -> Input:
        digest = sha256_of(self._path)
        if Identity.of(self._path) != self._before:
            raise changed(self._source)
        return Input(name=self._source.file_name, bytes=self._before.size, sha256=digest)
