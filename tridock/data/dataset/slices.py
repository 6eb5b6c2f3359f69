"""Writes data sets from slices of others, for merge and split. Either all outputs appear, or none."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from tridock.contracts.data_index import COPY_OR_REBUILD, HEADER
from tridock.contracts.partials import partial_folder, remove_left_folders
from tridock.data.dataset.indexed_dataset import (
    IndexedDataset,
    Tokens,
    bin_path,
    in_blocks,
    publish,
    write_index_of_blocks,
)
from tridock.data.dataset.manifest import DatasetManifest, manifest_path, write_manifest
from tridock.data.digest import Digest, sha256_of
from tridock.errors import Problem, RequestError

_BLOCK: Final = 8 << 20
_ZEROS: Final = bytes(_BLOCK)

Progress = Callable[[int, int], None]
"""Called with the bytes written, and the total."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Documents ``first`` to ``last`` (exclusive) of a data set with a checked index."""

    dataset: IndexedDataset
    first: int
    last: int

    @property
    def sequences(self) -> tuple[int, int]:
        """Its first and last (exclusive) sequence."""
        return int(self.dataset.document_index[self.first]), int(self.dataset.document_index[self.last])

    @property
    def bytes(self) -> tuple[int, int]:
        """Its byte range in the .bin."""
        start, end = self.dataset.token_bounds(self.first, self.last)
        return start * self.dataset.dtype.itemsize, end * self.dataset.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """A data set that was written. The hashes are None without a manifest."""

    prefix: Path
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    bytes: int
    bin_sha256: str | None
    idx_sha256: str | None

    def __str__(self) -> str:
        return (
            f"{self.prefix}: {self.documents:,} documents ({self.empty_documents:,} empty),"
            f" {self.sequences:,} sequences, {self.tokens:,} tokens, {self.bytes / 1e6:,.1f} MB"
        )


@dataclass(frozen=True, slots=True)
class Output:
    """A data set to write. Without a manifest nothing is hashed."""

    prefix: Path
    slices: tuple[Slice, ...]
    manifest: DatasetManifest | None

    @property
    def documents(self) -> int:
        return sum(part.last - part.first for part in self.slices)

    @property
    def sequences(self) -> int:
        return sum(end - start for start, end in (part.sequences for part in self.slices))

    @property
    def size(self) -> int:
        """Bytes on disk, including the index."""
        return self.tokens_size + HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)

    @property
    def tokens_size(self) -> int:
        """Bytes of the .bin."""
        return sum(end - start for start, end in (part.bytes for part in self.slices))


def write_outputs(outputs: Sequence[Output], progress: Progress | None = None) -> list[Written]:
    """Writes all outputs to temporary files, then renames them. Manifests of earlier data are removed.

    Raises :class:`RequestError` if there is not enough space, before anything is written, or if a file cannot be
    written.
    """
    todo = "free some space there, or choose another --output-prefix"
    with RequestError.in_place_of(OSError, outputs[0].prefix, "cannot be written", todo):
        for output in outputs:
            remove_left_folders(output.prefix)
        _check_free_space(outputs)
        with ExitStack() as stack:
            total = sum(output.tokens_size for output in outputs)
            files = [_Partial(output, stack.enter_context(partial_folder(output.prefix))) for output in outputs]
            done = 0
            for partial in files:
                for count in partial.write():
                    done += count
                    if progress is not None:
                        progress(done, total)
            return [partial.publish() for partial in files]


def _check_free_space(outputs: Sequence[Output]) -> None:
    folder = outputs[0].prefix.absolute().parent
    there = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = sum(output.size for output in outputs), shutil.disk_usage(there).free
    if needed > free:
        what = f"has not enough free space for {needed} bytes"
        raise RequestError(
            Problem(str(there), what, f"{free} bytes free", "free some space there, or choose another --output-prefix")
        )


class _Partial:
    """The temporary files of one output, in a folder of their own."""

    def __init__(self, output: Output, folder: Path) -> None:
        self._output = output
        self._bin, self._idx = folder / "bin", folder / "idx"
        self._hash = None if output.manifest is None else Digest()

    def write(self) -> Iterator[int]:
        """Writes both files; yields the size of each block of tokens."""
        slices = self._output.slices
        with self._bin.open("xb") as file:
            for part in slices:
                for block in _blocks(part):
                    if self._hash is not None:
                        self._hash.update(block)
                    _append(file, block)
                    yield len(block)
            file.truncate(file.tell())
            file.flush()
            os.fsync(file.fileno())
        dtype, sizes = slices[0].dataset.dtype, (self._output.sequences, self._output.documents + 1)
        write_index_of_blocks(self._idx, dtype, sizes, lambda: _lengths(slices), _document_index(slices))

    def publish(self) -> Written:
        """Renames the files, and writes the manifest last."""
        prefix, manifest = self._output.prefix, self._output.manifest
        last, empty = 0, 0
        for entries in _document_index(self._output.slices):
            empty += int((np.diff(entries, prepend=last) == 0).sum())
            last = int(entries[-1])
        size = self._bin.stat().st_size
        written = Written(
            prefix=prefix,
            documents=self._output.documents,
            empty_documents=empty - 1,  # the index starts with a 0
            sequences=self._output.sequences,
            tokens=size // self._output.slices[0].dataset.dtype.itemsize,
            bytes=size,
            bin_sha256=None if self._hash is None else self._hash.hexdigest(),
            idx_sha256=None if self._hash is None else sha256_of(self._idx),
        )
        manifest_path(prefix).unlink(missing_ok=True)
        publish(prefix, self._bin, self._idx)
        if manifest is not None:
            counted = ("documents", "sequences", "tokens", "bin_sha256", "idx_sha256")
            write_manifest(prefix, manifest.model_copy(update={name: getattr(written, name) for name in counted}))
        return written


def _blocks(part: Slice) -> Iterator[bytes]:
    position, end = part.bytes
    path = bin_path(part.dataset.prefix)
    with path.open("rb") as file:
        file.seek(position)
        while position < end:
            block = file.read(min(_BLOCK, end - position))
            if not block:
                raise RequestError(
                    Problem(str(path), "was truncated while it was read", f"{position} bytes", COPY_OR_REBUILD)
                )
            position += len(block)
            yield block


def _append(file: BinaryIO, block: bytes) -> None:
    """Appends a block; zeros become a hole, as with cp."""
    if block == (_ZEROS if len(block) == _BLOCK else _ZEROS[: len(block)]):
        file.seek(len(block), os.SEEK_CUR)
    else:
        file.write(block)


def _lengths(slices: Sequence[Slice]) -> Iterator[Tokens]:
    for part in slices:
        yield from in_blocks(part.dataset.lengths, *part.sequences)


def _document_index(slices: Sequence[Slice]) -> Iterator[Tokens]:
    yield np.zeros(1, np.int64)
    base = 0
    for part in slices:
        first, last = part.sequences
        for entries in in_blocks(part.dataset.document_index, part.first + 1, part.last + 1):
            yield entries - first + base
        base += last - first
