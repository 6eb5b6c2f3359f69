"""``tridock data inspect``: what a data set holds. One pass over the index; of the tokens only the samples are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tridock.data.dataset.indexed_dataset import IndexedDataset, Tokens, in_blocks
from tridock.data.dataset.lengths import Lengths
from tridock.data.dataset.manifest import DatasetManifest, manifest_path, read_manifest

if TYPE_CHECKING:
    from tridock.data.tokenize.tokenizer import BytePairTokenizer

SAMPLE_TOKENS: Final = 64
"""Of a sample, from its document's start."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The start of a document. ``text`` is None without a tokenizer, or where it has not all of the ids; ``tokens`` are
    those of the whole document."""

    document: int
    tokens: int
    ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a data set holds. ``documents`` and ``sequences`` are their lengths in tokens; an empty document's is 0."""

    prefix: Path
    dtype: str
    tokens: int
    bin_bytes: int
    idx_bytes: int
    documents: Lengths
    empty_documents: int
    sequences: Lengths
    manifest: DatasetManifest | None
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]

    @property
    def several_sequences(self) -> bool:
        """Whether documents have several sequences, which then have lengths of their own."""
        return self.sequences.count != self.documents.count - self.empty_documents


def inspect(prefix: Path, samples: int, tokenizer: BytePairTokenizer | None) -> Inspection:
    """Looks at the data set. ``samples`` documents are taken, from all over it and the same each time.

    Raises :class:`RequestError` where there is no data set, or one whose files do not fit together.
    """
    dataset = IndexedDataset(prefix)
    documents, sequences, empty = Lengths(), Lengths(), 0
    for block in _document_lengths(dataset):
        documents.add(block)
    for block in in_blocks(dataset.lengths):
        sequences.add(block)
    for counts in _sequences_of_documents(dataset):
        empty += int((counts == 0).sum())
    manifest = read_manifest(prefix)
    return Inspection(
        prefix=prefix,
        dtype=dataset.dtype.name,
        tokens=len(dataset.tokens),
        bin_bytes=dataset.tokens.nbytes,
        idx_bytes=dataset.index.path.stat().st_size,
        documents=documents,
        empty_documents=empty,
        sequences=sequences,
        manifest=manifest,
        samples=tuple(_samples(dataset, samples, tokenizer)),
        notes=tuple(_notes(dataset, manifest, tokenizer)),
    )


def _sequences_of_documents(dataset: IndexedDataset) -> Iterator[Tokens]:
    last = 0
    for entries in in_blocks(dataset.document_index, 1):
        yield np.diff(entries, prepend=last)
        last = int(entries[-1])


def _document_lengths(dataset: IndexedDataset) -> Iterator[Tokens]:
    """Tokens of each document, int64: from where its first sequence begins to where the next document's does."""
    width, last = dataset.dtype.itemsize, 0
    for entries in in_blocks(dataset.document_index, 1):
        inside = entries < len(dataset)
        ends = np.full(len(entries), len(dataset.tokens), np.int64)
        ends[inside] = dataset.offsets[entries[inside]] // width
        # A damaged index may go back; what is wrong with it is for `verify` to say.
        yield np.maximum(np.diff(ends, prepend=last), 0)
        last = int(ends[-1])


def _samples(dataset: IndexedDataset, count: int, tokenizer: BytePairTokenizer | None) -> Iterator[Sample]:
    count = min(count, dataset.documents)
    for number in range(count):
        document = number * (dataset.documents - 1) // max(count - 1, 1)
        start, end = dataset.token_bounds(document, document + 1)
        ids = tuple(int(token) for token in dataset.tokens[start : min(end, start + SAMPLE_TOKENS)])
        known = tokenizer is not None and all(0 <= token <= tokenizer.largest_id for token in ids)
        text = tokenizer.decode(ids) if tokenizer is not None and known else None
        yield Sample(document, max(end - start, 0), ids, text)


def _notes(
    dataset: IndexedDataset, manifest: DatasetManifest | None, tokenizer: BytePairTokenizer | None
) -> Iterator[str]:
    if manifest is None:
        return
    path = manifest_path(dataset.prefix)
    if manifest.tokens != len(dataset.tokens) or manifest.documents != dataset.documents:
        yield f"{path} belongs to other data: it counts {manifest.documents} documents and {manifest.tokens} tokens"
    if tokenizer is not None and tokenizer.sha256 != manifest.tokenizer_sha256:
        yield "the tokenizer is not the one that made the data: its texts may be wrong"
