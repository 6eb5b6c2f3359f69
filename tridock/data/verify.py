"""``tridock data verify``: a data set gone through whole, and every place where it is not what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from tridock.data.digest import Digest
from tridock.data.index_checks import Places, index_problems
from tridock.data.indexed_dataset import (
    COPY_OR_MAKE,
    Index,
    Tokens,
    bin_path,
    check_presence,
    idx_path,
    in_blocks,
    wrong_size,
)
from tridock.data.manifest import DatasetManifest, manifest_path, read_manifest
from tridock.errors import Problem, RequestError

_BLOCK: Final = 8 << 20
_COPY_ALL: Final = "copy all three files again, or make them again with `tridock data preprocess`"

Progress = Callable[[int], None]
"""Is told the bytes of the .bin that are done."""


@dataclass(slots=True)
class Verified:
    """What was looked at and what was found. ``str()`` is for the user."""

    prefix: Path
    problems: list[Problem] = field(default_factory=list)
    facts: str = ""
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        left = f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else ""
        return f"{self.prefix}: {self.facts}; checked: {', '.join(self.checked)}{left}"


def verify(prefix: Path, vocab_size: int | None = None, progress: Progress | None = None) -> Verified:
    """Goes through both files once. ``vocab_size`` None: the manifest's.

    Memory is a few blocks, whatever the size of the data.
    """
    found = Verified(prefix)
    try:
        _look(found, vocab_size, progress)
    except OSError as error:
        todo = "make it readable for this user, or copy it again"
        found.problems.append(
            Problem(str(error.filename or prefix), "cannot be read", error.strerror or str(error), todo)
        )
    return found


def _look(found: Verified, vocab_size: int | None, progress: Progress | None) -> None:
    prefix, manifest = found.prefix, _manifest(found)
    try:
        check_presence(prefix)
        index = Index(idx_path(prefix))
    except RequestError as error:
        found.problems += error.problems
        return
    data = bin_path(prefix)
    damage = index_problems(index)
    if (size := data.stat().st_size) != index.promised:
        damage.append(wrong_size(data, index.promised, size))
    found.problems += damage
    found.checked.append("structure")
    _counts(found, index, manifest, size)
    scan = _Scan(index, data, None if damage else _ends(index), vocab_size, manifest)
    scan.run(progress)
    scan.tell(found)
    _hashes(found, index, manifest, scan.sha256)


def _manifest(found: Verified) -> DatasetManifest | None:
    try:
        manifest = read_manifest(found.prefix)
    except RequestError as error:
        found.problems += error.problems
        return None
    if manifest is None:
        found.unchecked.append(f"counts, checksums, ends of documents ({manifest_path(found.prefix)} is not there)")
    return manifest


def _counts(found: Verified, index: Index, manifest: DatasetManifest | None, size: int) -> None:
    documents, sequences, tokens = len(index.document_index) - 1, len(index.lengths), size // index.dtype.itemsize
    found.facts = f"{documents:,} documents, {sequences:,} sequences, {tokens:,} tokens of {index.dtype.name}"
    if manifest is None:
        return
    path = manifest_path(found.prefix)
    for name, promised, there in (
        ("documents", manifest.documents, documents),
        ("sequences", manifest.sequences, sequences),
        ("tokens", manifest.tokens, tokens),
    ):
        if promised is not None and promised != there:
            found.problems.append(Problem(str(path), f"counts {promised} {name}", f"{there} in the files", _COPY_ALL))
    found.checked.append("counts")


def _hashes(found: Verified, index: Index, manifest: DatasetManifest | None, bin_sha256: str) -> None:
    if manifest is None:
        return
    promised = (manifest.bin_sha256, manifest.idx_sha256)
    for path, expected in zip((bin_path(found.prefix), index.path), promised, strict=True):
        if expected is None:
            found.unchecked.append(f"checksum of {path.suffix} (the manifest has none)")
            continue
        actual = bin_sha256 if path.suffix == ".bin" else _sha256(path)
        if actual != expected:
            what = f"is not the file of which {manifest_path(found.prefix).name} holds the sha256 {expected}"
            found.problems.append(Problem(str(path), what, actual, _COPY_ALL))
        found.checked.append(f"checksum of {path.suffix}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ends(index: Index) -> Iterator[Tokens]:
    """The place of the last token of every document that has tokens, int64, in order and in blocks."""
    last, width = 0, index.dtype.itemsize
    for entries in in_blocks(index.document_index, 1):
        begins = np.concatenate([np.array([last], np.int64), entries[:-1]])
        last = int(entries[-1])
        final = entries[entries > begins] - 1
        ends = index.offsets[final] // width + index.lengths[final]
        starts = index.offsets[begins[entries > begins]] // width
        yield (ends - 1)[ends > starts]


class _Scan:
    """One pass over the tokens. ``ends`` None: the index is damaged, and says nothing about places."""

    def __init__(
        self,
        index: Index,
        data: Path,
        ends: Iterator[Tokens] | None,
        vocab_size: int | None,
        manifest: DatasetManifest | None,
    ) -> None:
        self._index, self._data, self._ends, self._sound = index, data, ends or iter(()), ends is not None
        self._vocab_size = vocab_size or (manifest.vocab_size if manifest else None)
        self._closing = manifest.end_of_document if manifest else None
        self._hash = Digest() if manifest is not None and manifest.bin_sha256 else None
        self._outside, self._unclosed = Places(), Places()
        self._pending = np.zeros(0, np.int64)

    @property
    def sha256(self) -> str:
        """Of the whole file, where the manifest has one to compare."""
        return self._hash.hexdigest() if self._hash else ""

    def run(self, progress: Progress | None) -> None:
        """Reads the whole file."""
        width, position = self._index.dtype.itemsize, 0
        with self._data.open("rb") as file:
            while block := file.read(_BLOCK):
                if self._hash:
                    self._hash.update(block)
                tokens = np.frombuffer(block, self._index.dtype, len(block) // width)
                self._range(tokens, position // width)
                self._closed(tokens, position // width)
                position += len(block)
                if progress is not None:
                    progress(position)

    def _range(self, tokens: Tokens, start: int) -> None:
        if not len(tokens):
            return
        limit = np.iinfo(tokens.dtype).max if self._vocab_size is None else self._vocab_size - 1
        signed = tokens.dtype.kind == "i"
        if int(tokens.max()) > limit or (signed and int(tokens.min()) < 0):
            self._outside.add(np.flatnonzero((tokens.astype(np.int64) > limit) | (tokens < 0)) + start)

    def _closed(self, tokens: Tokens, start: int) -> None:
        if self._closing is None:
            return
        while not len(self._pending) or self._pending[-1] < start + len(tokens):
            more = next(self._ends, None)
            if more is None:
                break
            self._pending = np.concatenate([self._pending, more])
        cut = int(np.searchsorted(self._pending, start + len(tokens)))
        due, self._pending = self._pending[:cut], self._pending[cut:]
        self._unclosed.add(due[tokens[due - start] != self._closing])

    def tell(self, found: Verified) -> None:
        """What came out."""
        size, closing = self._vocab_size, self._closing
        what = "is below 0" if size is None else f"lies outside the vocabulary of {size} tokens"
        todo = "give the size of the tokenizer that made the data, or make it again with `tridock data preprocess`"
        outside = self._outside.problems(
            self._data, "such tokens", todo, lambda place: Problem(self._where(place), what, self._token(place), todo)
        )
        unclosed = self._unclosed.problems(
            self._data,
            f"documents that do not end with {closing}",
            COPY_OR_MAKE,
            lambda place: Problem(
                self._where(place),
                f"ends its document, and is not the {closing} that the manifest says closes every document",
                self._token(place),
                COPY_OR_MAKE,
            ),
        )
        found.problems += [*outside, *unclosed]
        if size is None:
            found.unchecked.append("upper bound of the tokens (no --vocab-size)")
        else:
            found.checked.append(f"tokens below {size}")
        if closing is not None and self._sound:
            found.checked.append(f"token {closing} at the end of every document")

    def _token(self, place: int) -> str:
        width = self._index.dtype.itemsize
        with self._data.open("rb") as file:
            file.seek(place * width)
            return str(np.frombuffer(file.read(width), self._index.dtype)[0])

    def _where(self, place: int) -> str:
        byte = place * self._index.dtype.itemsize
        if not self._sound:
            return f"{self._data}, byte {byte}"
        sequence = int(np.searchsorted(self._index.offsets, byte, side="right")) - 1
        document = int(np.searchsorted(self._index.document_index, sequence, side="right")) - 1
        return f"{self._data}, document {document}, sequence {sequence}, byte {byte}"
