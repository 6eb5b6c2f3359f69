"""``tridock data verify``: reads a whole data set and checks its index, tokens and checksums."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from tridock.contracts.data_index import COPY_OR_REBUILD, wrong_size
from tridock.data.dataset.index_maps import foreign_maps
from tridock.data.dataset.indexed_dataset import Index, Tokens, bin_path, check_presence, idx_path, in_blocks
from tridock.data.dataset.manifest import DatasetManifest, manifest_path, read_manifest
from tridock.data.digest import Digest, sha256_of
from tridock.errors import Problem, RequestError, reason_of

SHOWN: Final = 5
"""Positions per kind of problem that are reported; the others are only counted."""


class Positions:
    """The first positions of a problem, and their number."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.count = 0

    def add(self, places: Tokens) -> None:
        self.first += [int(place) for place in places[: SHOWN - len(self.first)]]
        self.count += len(places)

    def problems(self, file: object, what: str, todo: str, problem: Callable[[int], Problem]) -> Iterator[Problem]:
        """Yields a problem per reported position, and one that counts the others as ``what``."""
        yield from map(problem, self.first)
        if more := self.count - len(self.first):
            yield Problem(str(file), f"has more {what}", f"{more:,} more", todo)


def index_problems(index: Index) -> list[Problem]:
    """Returns negative lengths, gaps between offsets, and documents out of order in an index."""
    return [*_lengths(index), *_offsets(index), *_documents(index)]


def _lengths(index: Index) -> Iterator[Problem]:
    found, start = Positions(), 0
    for block in in_blocks(index.lengths):
        found.add(np.flatnonzero(block < 0) + start)
        start += len(block)

    def problem(sequence: int) -> Problem:
        where = f"{index.path}, sequence {sequence}"
        return Problem(where, "has a negative length", str(index.lengths[sequence]), COPY_OR_REBUILD)

    return found.problems(index.path, "negative lengths", COPY_OR_REBUILD, problem)


def _offsets(index: Index) -> Iterator[Problem]:
    """Compares each offset with the end of the previous sequence, so that one wrong length is one problem."""
    found, width, start, expected = Positions(), index.dtype.itemsize, 0, 0
    for lengths, offsets in zip(in_blocks(index.lengths), in_blocks(index.offsets), strict=True):
        ends = offsets + lengths.astype(np.int64) * width
        begins = np.concatenate([np.array([expected], np.int64), ends[:-1]])
        found.add(np.flatnonzero(offsets != begins) + start)
        start, expected = start + len(lengths), int(ends[-1])

    def problem(sequence: int) -> Problem:
        end = int(index.offsets[sequence - 1]) + int(index.lengths[sequence - 1]) * width if sequence else 0
        before = f"where sequence {sequence - 1} ends, at byte {end}" if sequence else "at byte 0"
        where = f"{index.path}, sequence {sequence}"
        return Problem(where, f"does not begin {before}", f"byte {index.offsets[sequence]}", COPY_OR_REBUILD)

    return found.problems(
        index.path, "sequences that do not begin where the one before them ends", COPY_OR_REBUILD, problem
    )


def _documents(index: Index) -> Iterator[Problem]:
    entries, sequences = index.document_index, len(index.lengths)
    found, start, last = Positions(), 0, 0
    for block in in_blocks(entries):
        before = np.concatenate([np.array([last], np.int64), block[:-1]])
        found.add(np.flatnonzero(block < before) + start)
        start, last = start + len(block), int(block[-1])

    def problem(document: int) -> Problem:
        where, got = f"{index.path}, document {document}", f"sequence {entries[document]}"
        before = f"sequence {entries[document - 1]}, where document {document - 1} does" if document else "sequence 0"
        return Problem(where, f"begins before {before}", got, COPY_OR_REBUILD)

    if entries[0] > 0:
        yield Problem(f"{index.path}, document 0", "does not begin at sequence 0", str(entries[0]), COPY_OR_REBUILD)
    what = "documents that begin before the previous one"
    yield from found.problems(index.path, what, COPY_OR_REBUILD, problem)
    if last != sequences:
        what = f"ends at another sequence than the last of {sequences}"
        yield Problem(f"{index.path}, the document index", what, str(last), COPY_OR_REBUILD)


_BLOCK: Final = 8 << 20

Progress = Callable[[int], None]
"""Called with the bytes of the .bin that were read."""


def document_ends(index: Index) -> Iterator[Tokens]:
    """Yields the position of the last token of every non-empty document, int64, in blocks."""
    last, width = 0, index.dtype.itemsize
    for entries in in_blocks(index.document_index, 1):
        begins = np.concatenate([np.array([last], np.int64), entries[:-1]])
        last = int(entries[-1])
        final = entries[entries > begins] - 1
        ends = index.offsets[final] // width + index.lengths[final]
        starts = index.offsets[begins[entries > begins]] // width
        yield (ends - 1)[ends > starts]


class TokenScan:
    """Checks the tokens in one pass. ``ends`` is None if the index is damaged."""

    def __init__(
        self,
        index: Index,
        data: Path,
        ends: Iterator[Tokens] | None,
        vocab_size: int | None,
        manifest: DatasetManifest | None,
    ) -> None:
        self._index, self._data, self._ends, self._sound = index, data, ends or iter(()), ends is not None
        self.vocab_size = vocab_size or (manifest.vocab_size if manifest else None)
        self.closing = manifest.end_of_document if manifest else None
        self._hash = Digest() if manifest is not None and manifest.bin_sha256 else None
        self._outside, self._unclosed = Positions(), Positions()
        self._pending = np.zeros(0, np.int64)

    @property
    def sha256(self) -> str:
        """SHA-256 of the file; empty if the manifest has none."""
        return self._hash.hexdigest() if self._hash else ""

    def run(self, progress: Progress | None) -> None:
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
        limit = np.iinfo(tokens.dtype).max if self.vocab_size is None else self.vocab_size - 1
        signed = tokens.dtype.kind == "i"
        if int(tokens.max()) > limit or (signed and int(tokens.min()) < 0):
            self._outside.add(np.flatnonzero((tokens.astype(np.int64) > limit) | (tokens < 0)) + start)

    def _closed(self, tokens: Tokens, start: int) -> None:
        if self.closing is None:
            return
        while not len(self._pending) or self._pending[-1] < start + len(tokens):
            more = next(self._ends, None)
            if more is None:
                break
            self._pending = np.concatenate([self._pending, more])
        cut = int(np.searchsorted(self._pending, start + len(tokens)))
        due, self._pending = self._pending[:cut], self._pending[cut:]
        self._unclosed.add(due[tokens[due - start] != self.closing])

    def problems(self) -> Iterator[Problem]:
        outside = f"is outside the vocabulary of {self.vocab_size} tokens" if self.vocab_size else "is below 0"
        todo = "give the size of the tokenizer of the data, or build it again with `tridock data preprocess`"
        yield from self._outside.problems(
            self._data,
            "such tokens",
            todo,
            lambda place: Problem(self._where(place), outside, self._token(place), todo),
        )
        unclosed = f"ends its document instead of {self.closing}, the end of document in the manifest"
        yield from self._unclosed.problems(
            self._data,
            f"documents that do not end with {self.closing}",
            COPY_OR_REBUILD,
            lambda place: Problem(self._where(place), unclosed, self._token(place), COPY_OR_REBUILD),
        )

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


_COPY_ALL: Final = "copy all three files again, or build them again with `tridock data preprocess`"


@dataclass(slots=True)
class Verified:
    """The result of a check. ``str()`` is for the user."""

    prefix: Path
    problems: list[Problem] = field(default_factory=list)
    facts: str = ""
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        left = f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else ""
        return f"{self.prefix}: {self.facts}; checked: {', '.join(self.checked)}{left}"


def verify(prefix: Path, vocab_size: int | None = None, progress: Progress | None = None) -> Verified:
    """Reads both files once, with the memory of a few blocks. ``vocab_size`` defaults to the manifest's."""
    found = Verified(prefix)
    try:
        _verify(found, vocab_size, progress)
    except OSError as error:
        todo = "make it readable for this user, or copy it again"
        found.problems.append(Problem(str(error.filename or prefix), "cannot be read", reason_of(error), todo))
    return found


def _verify(found: Verified, vocab_size: int | None, progress: Progress | None) -> None:
    prefix, manifest = found.prefix, _manifest(found)
    found.problems += foreign_maps(prefix)
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
    scan = TokenScan(index, data, None if damage else document_ends(index), vocab_size, manifest)
    scan.run(progress)
    found.problems += scan.problems()
    if scan.vocab_size is None:
        found.unchecked.append("upper bound of the tokens (no --vocab-size)")
    else:
        found.checked.append(f"tokens below {scan.vocab_size}")
    if scan.closing is not None and not damage:
        found.checked.append(f"token {scan.closing} at the end of every document")
    _hashes(found, index, manifest, scan.sha256)


def _manifest(found: Verified) -> DatasetManifest | None:
    try:
        manifest = read_manifest(found.prefix)
    except RequestError as error:
        found.problems += error.problems
        return None
    if manifest is None:
        found.unchecked.append(f"counts, checksums, ends of documents ({manifest_path(found.prefix)} is missing)")
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
        actual = bin_sha256 if path.suffix == ".bin" else sha256_of(path)
        if actual != expected:
            what = f"does not have the sha256 {expected} of {manifest_path(found.prefix).name}"
            found.problems.append(Problem(str(path), what, actual, _COPY_ALL))
        found.checked.append(f"checksum of {path.suffix}")
