"""Reads inputs in chunks of whole lines."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

from tridock.data.dataset.manifest import Input
from tridock.data.digest import Digest, sha256_of
from tridock.data.input.compression import DAMAGE, compression_of, decompressed
from tridock.data.input.remote import RemoteFile
from tridock.data.input.signatures import START, foreign
from tridock.data.input.tables import Arrow, Parquet, column_of, value_in_json
from tridock.data.tokenize.memory import limited_growth
from tridock.errors import Problem, RequestError, reason_of

_FIRST_LINE: Final = 1 << 20
_LONGEST_LINE: Final = 256 << 20
"""Maximum bytes of a line, which must fit in memory: a small compressed file may have one of many gigabytes."""
_MOST_MEMORY: Final = 2 << 30
"""Bytes that a batch of a table may need: a small file may claim any size."""
TODO_INPUT: Final = "give files, folders or patterns that exist, or - for standard input"


class Kind(StrEnum):
    """How an input is split into documents."""

    JSONL = "jsonl"
    TEXT = "text"
    PARQUET = "parquet"
    ARROW = "arrow"
    CSV = "csv"
    TSV = "tsv"
    FILE = "file"


TABLES: Final = (Kind.PARQUET, Kind.ARROW)
"""Kinds that are detected by content, whatever ``--input-format`` says, and read at any place of a file."""


@dataclass(frozen=True, slots=True)
class Source:
    """One input. ``path`` is None for standard input and for a ``url``. ``name`` is printable: valid UTF-8."""

    name: str
    path: Path | None
    kind: Kind
    bytes: int = 0
    url: str = ""

    @property
    def file_name(self) -> str:
        """Name without its folder."""
        return self.name.rpartition("/")[2] if self.path is None else printable(self.path.name)


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
    """Counts the bytes of a file, and hashes them unless they are its lines, which are hashed anyway."""

    def __init__(self, file: BinaryIO, hashes: bool) -> None:
        self._file, self.bytes = file, 0
        self.digest = Digest() if hashes else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.bytes += len(data)
        if self.digest is not None:
            self.digest.update(data)
        return len(data)

    def drain(self) -> None:
        """Reads the bytes that a decompressor left, so that the hash covers the whole file."""
        while self.read(1 << 20):
            pass


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
    blocks: _Table | _Stream = _Table(source, keys) if source.kind in TABLES else _Stream(source, keys)
    return _chunks_of_blocks(number, source, blocks, size)


def first_line(source: Source) -> bytes:
    """Returns the first line that is not blank, at most a megabyte; b"" for an empty or unreadable file."""
    if source.path is None or not source.path.is_file():
        return b""  # reading from a pipe would consume it
    try:
        with source.path.open("rb") as file:
            start: bytes = decompressed(source.name, file).read(_FIRST_LINE)
            return start.lstrip().partition(b"\n")[0]
    except DAMAGE:
        return b""


def _is_plain(path: Path) -> bool:
    """Whether a path is an uncompressed file. A file that cannot be read fails when it is opened."""
    try:
        return path.is_file() and compression_of(path) is None
    except OSError:
        return False


def _too_long(source: Source, line: int) -> RequestError:
    what = f"is longer than {_LONGEST_LINE >> 20} MiB"
    todo = "put each document on a line of its own: jq -c '.[]' FILE does it with a JSON array"
    return RequestError(Problem(f"{source.name}:{line}", what, "", todo))


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
    return RequestError(Problem(source.name, "cannot be read", reason_of(error), TODO_INPUT))


def _chunks_of_blocks(number: int, source: Source, blocks: _Table | _Stream, size: int) -> Iterator[Chunk]:
    line, offset, content, rest, pending = 1, 0, Digest(), [b""], 0

    def chunk(data: bytes, broken: Problem | None = None) -> Chunk:
        nonlocal line, offset
        first, lines = line, data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
        line, offset = line + lines, offset + len(data)
        content.update(data)
        position = blocks.position()
        mark, plain = content.mark(), blocks.plain if data else None
        return Chunk(source, number, first, data, lines, offset, mark, position, broken=broken, plain=plain)

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
                raise _too_long(source, line + sum(data.count(b"\n") for data in rest))
    except DAMAGE as error:
        data = b"".join(rest)
        cut = data.rfind(b"\n") + 1
        if cut:
            yield chunk(data[:cut])
        yield chunk(data[cut:], broken=_problem(source, line, error))
        rest = []
    if any(rest):
        yield chunk(b"".join(rest))
    yield replace(chunk(b""), finished=blocks.facts(content), changed_ns=blocks.changed_ns)


class _Stream:
    """Decompressed blocks of a file or of standard input."""

    def __init__(self, source: Source, keys: Sequence[str]) -> None:
        self._source, self._keys = source, list(dict.fromkeys(keys))
        try:
            opened = _opened(source)
        except OSError as error:
            raise _unreadable(source, error) from None
        self._opened = opened
        self._before = Identity.of(opened.fileno()) if source.path and source.path.is_file() else None
        self.changed_ns = self._before.changed_ns if self._before else 0
        lines = source.kind in (Kind.JSONL, Kind.TEXT)
        self.plain = self._before if lines and source.path and _is_plain(source.path) else None
        """Of an uncompressed file of lines."""
        self._counted = _CountingReader(cast("BinaryIO", opened), hashes=self.plain is None)

    def read(self, size: int) -> Iterator[bytes]:
        raw = io.BufferedReader(self._counted, 1 << 17)
        stream = decompressed(self._source.name, raw)
        if self._source.path is None and (problem := foreign(self._source.name, stream.peek(START)[:START], None)):
            raise RequestError(problem)
        if self._source.kind in (Kind.CSV, Kind.TSV):
            yield from self._rows(stream)
        elif self._source.kind is Kind.FILE:
            content = stream.read(_LONGEST_LINE + 1)
            if len(content) > _LONGEST_LINE:
                raise _too_long(self._source, 1)
            yield json.dumps({self._keys[0]: content}, default=value_in_json).encode() + b"\n"
        # read1, not read: it first returns the bytes before any damage.
        step = max(1, min(size, 1 << 18))
        while block := stream.read1(step):
            yield block

    def _rows(self, stream: Any) -> Iterator[bytes]:
        """Yields the rows of a CSV file with a header, as JSON lines. A blank line is no row."""
        self._text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        pending = 0

        def lines() -> Iterator[str]:
            nonlocal pending
            while line := self._text.readline(_LONGEST_LINE + 1):
                pending += len(line)
                if pending > _LONGEST_LINE:
                    raise _too_long(self._source, reader.line_num + 1)
                yield line

        csv.field_size_limit(_LONGEST_LINE)
        reader = csv.reader(lines(), delimiter="," if self._source.kind is Kind.CSV else "\t", strict=True)
        try:
            header = next(reader, [])
            if absent := [key for key in self._keys if header.count(key) != 1]:
                got = f"the columns {', '.join(header)}"
                raise RequestError([_no_column(self._source, key, got) for key in absent])
            places = {key: header.index(key) for key in self._keys}
            for row in filter(None, reader):
                pending = 0
                short: object = {"fields": len(row), "columns": len(header)}  # which is no text: the row is rejected
                found = {
                    key: row[place].encode(errors="surrogateescape") if len(row) == len(header) else short
                    for key, place in places.items()
                }
                yield json.dumps(found, default=value_in_json).encode() + b"\n"
        except csv.Error as error:
            raise OSError(f"row {reader.line_num}: {error}") from error

    def position(self) -> int:
        return self._counted.bytes

    def facts(self, content: Digest) -> Input:
        """Returns what identifies the file; ``content`` is the hash of its lines."""
        self._counted.drain()
        if self._before is not None:
            _check_unchanged(self._source, self._opened.fileno(), self._before)
        if self._source.path is not None or self._source.url:
            self._opened.close()
        digest = (self._counted.digest or content).hexdigest()
        return Input(name=self._source.file_name, bytes=self._counted.bytes, sha256=digest)


def _opened(source: Source) -> io.RawIOBase | IO[bytes]:
    if source.url:
        return RemoteFile(source.url)
    if source.path is not None:
        return source.path.open("rb", buffering=0)
    # None if the caller closed it.
    if sys.stdin is None:
        todo = "give it lines, or name files as --input"
        raise RequestError(Problem("standard input", "is closed", "", todo))
    return sys.stdin.buffer


class _Table:
    """Rows of a Parquet or Arrow file as JSON lines: messages call a row a line."""

    plain: Identity | None = None

    def __init__(self, source: Source, keys: Sequence[str]) -> None:
        import pyarrow.parquet  # noqa: F401  not while memory is limited, and its absence is another error

        self._source = source
        self._path = source.path or self._downloaded(source.url)  # tables from standard input are refused
        self._before = Identity.of(self._path)
        self._keys = list(dict.fromkeys(keys))
        self._position = 0
        try:
            with limited_growth(_MOST_MEMORY):
                self._file = Parquet(self._path) if source.kind is Kind.PARQUET else Arrow(self._path)
        except MemoryError as error:
            raise _too_large(source, error) from None
        except Exception as error:  # pyarrow raises many types
            todo = "copy the file again"
            raise RequestError(Problem(source.name, f"is not valid {source.kind.title()}", str(error), todo)) from None
        columns = {key: column_of(self._file.schema, key) for key in keys}
        if absent := [key for key, column in columns.items() if column is None]:
            got = f"the columns {', '.join(self._file.schema.names)}"
            raise RequestError([_no_column(source, key, got) for key in absent])
        self._columns = list(dict.fromkeys(cast("Iterable[str]", columns.values())))
        self.changed_ns = self._before.changed_ns

    def read(self, size: int) -> Iterator[bytes]:
        """Yields batches of rows of about ``size`` bytes together."""
        batches = self._file.batches(size, self._keys, self._columns)
        try:
            while True:
                with limited_growth(_MOST_MEMORY):
                    found = next(batches, None)
                    if found is None:
                        return
                    batch, share = found
                    # A value that JSON cannot represent becomes an object, which is not a text: the row is rejected.
                    rows = [json.dumps(row, default=value_in_json).encode() + b"\n" for row in batch.to_pylist()]
                self._position = int(self._before.size * share)
                yield b"".join(rows)
        except MemoryError as error:
            raise _too_large(self._source, error) from None
        except ValueError as error:  # pyarrow's for damaged pages, Python's for text that is not UTF-8
            raise OSError(str(error)) from error

    def _downloaded(self, url: str) -> Path:
        """Returns a temporary copy, because tables are read at any place. It lives as long as this object."""
        try:
            self._copy = tempfile.NamedTemporaryFile(prefix="tridock-")  # noqa: SIM115  closes with this object
            shutil.copyfileobj(RemoteFile(url), self._copy, 1 << 20)
            self._copy.flush()
        except OSError as error:
            todo = "free some space there, or set TMPDIR"
            raise RequestError(Problem(tempfile.gettempdir(), "cannot be written", reason_of(error), todo)) from None
        return Path(self._copy.name)

    def position(self) -> int:
        return self._position

    def facts(self, _content: Digest) -> Input:
        digest = sha256_of(self._path)
        if Identity.of(self._path) != self._before:
            raise changed(self._source)
        return Input(name=self._source.file_name, bytes=self._before.size, sha256=digest)


def _no_column(source: Source, key: str, got: str) -> Problem:
    return Problem(source.name, f"has no column {key!r}", got, "name columns of text with --json-keys")


def _too_large(source: Source, error: MemoryError) -> RequestError:
    what, todo = f"needs more than {_MOST_MEMORY >> 30} GiB at once", "write it again, with smaller pages or batches"
    return RequestError(Problem(source.name, what, str(error), todo))
