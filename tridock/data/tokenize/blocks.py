"""Encodes lines into blocks: documents as the bytes of a data set."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tridock.data.dataset.indexed_dataset import token_dtype
from tridock.data.input.documents import Rejection, parse
from tridock.data.input.sources import Kind
from tridock.data.tokenize.encoders import Encoder, Ids


@dataclass(frozen=True, slots=True)
class Block:
    """Documents of one key: ``tokens`` in the data set's type, ``lengths`` of the sequences as the bytes of int32[S],
    and the number of ``sequences`` per document, int64[documents]."""

    tokens: Ids
    lengths: bytes
    sequences: Ids


@dataclass(frozen=True, slots=True)
class Encoded:
    """The documents of a chunk, a block per key, and its rejected lines."""

    blocks: tuple[Block, ...]
    documents: int
    empty: int
    rejected_lines: list[Rejection]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How lines become blocks: the encoder, the JSON keys, and whether documents end with a token."""

    encoder: Encoder
    keys: tuple[str, ...]
    append_eod: bool

    def encode(self, data: bytes, kind: Kind) -> Encoded:
        found = parse(data, self.keys, kind)
        ids = self.encoder.encode([text for texts in found.texts for text in texts])
        blocks: list[Block] = []
        empty = np.zeros(len(found.counts[0]), dtype=bool)
        start = 0
        for texts, counts in zip(found.texts, found.counts, strict=True):
            own = ids[start : start + len(texts)]
            start += len(texts)
            block = assemble(own, counts, self._closing, token_dtype(self.encoder.vocab_size))
            empty |= block.sequences == 0
            blocks.append(block)
        return Encoded(tuple(blocks), len(empty), int(empty.sum()), found.rejected_lines)

    @property
    def _closing(self) -> int | None:
        return self.encoder.end_of_document if self.append_eod and not self.encoder.always_closed else None


def assemble(ids: Sequence[Ids], counts: Sequence[int], closing: int | None, dtype: np.dtype[Any]) -> Block:
    """Builds a block as Megatron does: an empty text is no sequence; ``closing`` ends the last sequence of a document.

    ``ids`` has the ids of each text, uint32[tokens]; ``counts`` the texts per document. An empty one is not closed.
    """
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    kept = lengths > 0
    document = np.repeat(np.arange(len(counts)), np.array(counts, np.int64))
    sequences = np.bincount(document[kept], minlength=len(counts)).astype(np.int64)
    lengths = lengths[kept]
    if closing is not None:
        lengths[np.cumsum(sequences)[sequences > 0] - 1] += 1
        ids = list(_closed(ids, counts, sequences.tolist(), np.array([closing], np.uint32)))
    none = np.zeros(0, np.uint32)
    # One copy, which also casts. check_ids_fit has ensured that ids fit the type.
    tokens = np.concatenate([none, *ids], dtype=dtype, casting="unsafe")
    return Block(tokens, lengths.astype("<i4").tobytes(), sequences)


def _closed(ids: Sequence[Ids], counts: Sequence[int], sequences: Sequence[int], closing: Ids) -> Iterator[Ids]:
    """Yields the ids of the texts, and ``closing`` after every non-empty document."""
    start = 0
    for count, own in zip(counts, sequences, strict=True):
        yield from ids[start : start + count]
        start += count
        if own:
            yield closing
