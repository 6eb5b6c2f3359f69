"""What stands in an index, looked at whole: every place where lengths, offsets or documents do not follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from tridock.data.dataset.indexed_dataset import COPY_OR_MAKE, Index, Tokens, in_blocks
from tridock.errors import Problem

SHOWN: Final = 5
"""Places of one kind that are told; of the others only how many there are."""


class Places:
    """The first places where something is wrong, and how many there are in all."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.count = 0

    def add(self, places: Tokens) -> None:
        """More of them, in order."""
        self.first += [int(place) for place in places[: SHOWN - len(self.first)]]
        self.count += len(places)

    def problems(self, file: object, what: str, todo: str, problem: Callable[[int], Problem]) -> Iterator[Problem]:
        """One for each that is told; ``what`` names the others."""
        yield from map(problem, self.first)
        if more := self.count - len(self.first):
            yield Problem(str(file), f"has more {what}", f"{more:,} more", todo)


def index_problems(index: Index) -> list[Problem]:
    """All that is wrong inside an index: negative lengths, offsets that leave gaps, documents out of order."""
    return [*_lengths(index), *_offsets(index), *_documents(index)]


def _lengths(index: Index) -> Iterator[Problem]:
    found, start = Places(), 0
    for block in in_blocks(index.lengths):
        found.add(np.flatnonzero(block < 0) + start)
        start += len(block)

    def problem(sequence: int) -> Problem:
        where = f"{index.path}, sequence {sequence}"
        return Problem(where, "has a negative length", str(index.lengths[sequence]), COPY_OR_MAKE)

    return found.problems(index.path, "negative lengths", COPY_OR_MAKE, problem)


def _offsets(index: Index) -> Iterator[Problem]:
    """Each sequence begins where the one before it ends: so one wrong length is one place, not all that follow."""
    found, width, start, expected = Places(), index.dtype.itemsize, 0, 0
    for lengths, offsets in zip(in_blocks(index.lengths), in_blocks(index.offsets), strict=True):
        ends = offsets + lengths.astype(np.int64) * width
        begins = np.concatenate([np.array([expected], np.int64), ends[:-1]])
        found.add(np.flatnonzero(offsets != begins) + start)
        start, expected = start + len(lengths), int(ends[-1])

    def problem(sequence: int) -> Problem:
        end = int(index.offsets[sequence - 1]) + int(index.lengths[sequence - 1]) * width if sequence else 0
        before = f"where sequence {sequence - 1} ends, at byte {end}" if sequence else "at byte 0"
        where = f"{index.path}, sequence {sequence}"
        return Problem(where, f"does not begin {before}", f"byte {index.offsets[sequence]}", COPY_OR_MAKE)

    return found.problems(
        index.path, "sequences that do not begin where the one before them ends", COPY_OR_MAKE, problem
    )


def _documents(index: Index) -> Iterator[Problem]:
    entries, sequences = index.document_index, len(index.lengths)
    found, start, last = Places(), 0, 0
    for block in in_blocks(entries):
        before = np.concatenate([np.array([last], np.int64), block[:-1]])
        found.add(np.flatnonzero(block < before) + start)
        start, last = start + len(block), int(block[-1])

    def problem(document: int) -> Problem:
        where, got = f"{index.path}, document {document}", f"sequence {entries[document]}"
        before = f"sequence {entries[document - 1]}, where document {document - 1} does" if document else "sequence 0"
        return Problem(where, f"begins before {before}", got, COPY_OR_MAKE)

    if entries[0] > 0:
        yield Problem(f"{index.path}, document 0", "does not begin at sequence 0", str(entries[0]), COPY_OR_MAKE)
    what = "documents that begin before the one before them"
    yield from found.problems(index.path, what, COPY_OR_MAKE, problem)
    if last != sequences:
        what = f"ends at another sequence than the last of {sequences}"
        yield Problem(f"{index.path}, the document index", what, str(last), COPY_OR_MAKE)
