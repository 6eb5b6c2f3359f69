"""Encoded documents as the bytes that go into a data set: what a worker makes of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tridock.data.documents import Refusal, parse
from tridock.data.encoders import Encoder, Ids
from tridock.data.indexed_dataset import token_dtype
from tridock.data.sources import Kind


@dataclass(frozen=True, slots=True)
class Block:
    """Documents of one key: ``tokens`` (bytes of the data set's type), ``lengths`` of the sequences, int32[S] in bytes,
    and ``sequences``, how many of them each document has, int64[documents]."""

    tokens: bytes
    lengths: bytes
    sequences: Ids


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk's documents, a block for each key; and its lines that are no documents."""

    blocks: tuple[Block, ...]
    documents: int
    empty: int
    refused: list[Refusal]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What turns lines into blocks."""

    encoder: Encoder
    keys: tuple[str, ...]
    append_eod: bool

    def encode(self, data: bytes, kind: Kind) -> Encoded:
        """The documents of whole lines."""
        found = parse(data, self.keys, kind)
        ids, lengths = self.encoder.encode([text for texts in found.texts for text in texts])
        blocks: list[Block] = []
        empty = np.zeros(len(found.counts[0]), dtype=bool)
        text = token = 0
        for texts, counts in zip(found.texts, found.counts, strict=True):
            own = lengths[text : text + len(texts)]
            end = token + int(own.sum())
            block = assemble(ids[token:end], own, counts, self._closing, token_dtype(self.encoder.vocab_size))
            text, token = text + len(texts), end
            empty |= block.sequences == 0
            blocks.append(block)
        return Encoded(tuple(blocks), len(empty), int(empty.sum()), found.refused)

    @property
    def _closing(self) -> int | None:
        return self.encoder.end_of_document if self.append_eod and not self.encoder.always_closed else None


def assemble(ids: Ids, lengths: Ids, counts: Sequence[int], closing: int | None, dtype: np.dtype[Any]) -> Block:
    """Megatron's rule: a text without tokens leaves no sequence; ``closing`` ends the last sequence of a document.

    ``lengths``: tokens of each text; ``counts``: texts of each document. A document without tokens is not closed.
    """
    document = np.repeat(np.arange(len(counts)), np.array(counts, np.int64))
    kept = lengths > 0
    sequences = np.bincount(document[kept], minlength=len(counts)).astype(np.int64)
    lengths = lengths[kept]
    if closing is None:
        tokens = ids.astype(dtype)
    else:
        last = np.cumsum(sequences)[sequences > 0] - 1
        lengths[last] += 1
        tokens = np.full(len(ids) + len(last), closing, dtype)
        own = np.ones(len(tokens), dtype=bool)
        own[np.cumsum(lengths)[last] - 1] = False
        tokens[own] = ids
    return Block(tokens.tobytes(), lengths.astype("<i4").tobytes(), sequences)
