"""One pass over the tokens of a data set: their range, the ends of documents, the hash of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tridock.data.dataset.index_checks import Places
from tridock.data.dataset.indexed_dataset import COPY_OR_MAKE, Index, Tokens, in_blocks
from tridock.data.dataset.manifest import DatasetManifest
from tridock.data.digest import Digest
from tridock.errors import Problem

_BLOCK: Final = 8 << 20

Progress = Callable[[int], None]
"""Is told the bytes of the .bin that are done."""


def ends_of_documents(index: Index) -> Iterator[Tokens]:
    """The place of the last token of every document that has tokens, int64, in order and in blocks."""
    last, width = 0, index.dtype.itemsize
    for entries in in_blocks(index.document_index, 1):
        begins = np.concatenate([np.array([last], np.int64), entries[:-1]])
        last = int(entries[-1])
        final = entries[entries > begins] - 1
        ends = index.offsets[final] // width + index.lengths[final]
        starts = index.offsets[begins[entries > begins]] // width
        yield (ends - 1)[ends > starts]


class TokenScan:
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
        self.vocab_size = vocab_size or (manifest.vocab_size if manifest else None)
        self.closing = manifest.end_of_document if manifest else None
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
        """What came out."""
        outside = f"lies outside the vocabulary of {self.vocab_size} tokens" if self.vocab_size else "is below 0"
        todo = "give the size of the tokenizer that made the data, or make it again with `tridock data preprocess`"
        yield from self._outside.problems(
            self._data,
            "such tokens",
            todo,
            lambda place: Problem(self._where(place), outside, self._token(place), todo),
        )
        unclosed = f"ends its document, and is not the {self.closing} that the manifest says closes every document"
        yield from self._unclosed.problems(
            self._data,
            f"documents that do not end with {self.closing}",
            COPY_OR_MAKE,
            lambda place: Problem(self._where(place), unclosed, self._token(place), COPY_OR_MAKE),
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
