"""Encodes chunks into blocks, documents as the bytes of a data set, in several processes and in order.

Token ids come back through shared memory.
"""

import ctypes
import mmap
import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tridock.data.dataset.indexed_dataset import token_dtype
from tridock.data.input.documents import Rejection, parse
from tridock.data.input.sources import Chunk, Identity, Kind, Source, lines_of, read_again
from tridock.data.tokenize.encoders import Encoder, Ids
from tridock.errors import Problem, RunError


@dataclass(frozen=True, slots=True)
class Block:
    """Documents of one key: ``tokens`` in the type of the data set, ``lengths`` of the sequences as bytes of int32[S],
    and the number of ``sequences`` of each document, int64[documents]."""

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


Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """Arrays in a slot, one behind the other: type and number of elements of each."""

    slot: int
    parts: tuple[tuple[str, int], ...]


class Slots:
    """``count`` slots of ``size`` bytes in memory that forked processes share. Unused slots take no memory.

    The parent acquires a slot per task, a worker writes arrays to it, and the arrays that ``read`` returns keep the
    slot until they are garbage-collected.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, count * size)
        self._free = list(range(count))

    def acquire(self) -> int | None:
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def write(self, slot: int, arrays: Sequence[Array]) -> SlotArrays | None:
        """Copies arrays to a slot. Returns None if they do not fit."""
        if sum(array.nbytes for array in arrays) > self._size:
            return None
        start = slot * self._size
        for array in arrays:
            self._at(start, array.dtype.str, array.size)[:] = array
            start += array.nbytes
        return SlotArrays(slot, tuple((array.dtype.str, array.size) for array in arrays))

    def read(self, placed: SlotArrays) -> list[Array]:
        """Returns views of the arrays. The slot is released with the last of them."""
        whole = self._at(placed.slot * self._size, "u1", self._size)
        weakref.finalize(whole, self.release, placed.slot)
        arrays, start = [], 0
        for dtype, size in placed.parts:
            end = start + np.dtype(dtype).itemsize * size
            arrays.append(whole[start:end].view(dtype))
            start = end
        return arrays

    def _at(self, start: int, dtype: str, size: int) -> Array:
        return np.frombuffer(self._memory, dtype, size, start)


_PR_SET_PDEATHSIG: Final = 1
_SLOT_BYTES: Final = 6 << 20
"""Larger than the tokens of a chunk; those of a very long line go through a pipe."""
_recipe: Recipe
_slots: Slots
Result = tuple[Encoded, SlotArrays | None]


@dataclass(frozen=True, slots=True)
class _Task:
    """A chunk, the future of its result if it has lines, and the slot for its tokens."""

    chunk: Chunk
    future: Future[Result] | None = None
    slot: int | None = None


def encode_in_order(recipe: Recipe, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded | None]]:
    """Yields each chunk with its documents; None for a chunk without lines, or with a truncated line.

    With one worker this process encodes. At most two chunks per worker are in flight. Workers read the lines of
    uncompressed files themselves.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, None if _has_no_lines(chunk) else recipe.encode(chunk.data, chunk.source.kind)
        return
    # Fork, so that the tokenizer is shared. No thread of Tridock runs yet, and no worker uses a library's threads.
    context = multiprocessing.get_context("fork")
    # For the chunks in flight, and a few whose tokens are being written and hashed.
    slots = Slots(2 * workers + 4, _SLOT_BYTES)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (recipe, slots, os.getpid()))
    in_flight: deque[_Task] = deque()
    try:
        _fork_workers(pool)
        for chunk in chunks:
            in_flight.append(_submit(chunk, pool, slots))
            if len(in_flight) >= 2 * workers:
                yield _result(in_flight.popleft(), slots)
        while in_flight:
            yield _result(in_flight.popleft(), slots)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _fork_workers(pool: ProcessPoolExecutor) -> None:
    """Forks all workers before reading starts threads. Delays Ctrl-C, which would leave a pool that cannot shut down.

    Or it would be lost: an exception in a function that Python calls around a fork is only printed. Blocking the signal
    does not help, because a library's thread gets it then, and Python still raises it in the main thread.
    """
    received: list[tuple[int, FrameType | None]] = []
    in_main_thread = threading.current_thread() is threading.main_thread()  # only it handles signals
    handler = (
        signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame))) if in_main_thread else None
    )
    try:
        pool.submit(int).result()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
    if received and callable(handler):
        handler(*received[0])


def _submit(chunk: Chunk, pool: ProcessPoolExecutor, slots: Slots) -> _Task:
    if _has_no_lines(chunk):
        return _Task(chunk)
    slot = slots.acquire()
    if chunk.plain is not None:
        part = lines_of(chunk)
        return _Task(replace(chunk, data=b""), pool.submit(_encode_part, slot, chunk.source, *part), slot)
    return _Task(chunk, pool.submit(_encode, slot, chunk.data, chunk.source.kind), slot)


def _has_no_lines(chunk: Chunk) -> bool:
    return not chunk.data or chunk.broken is not None


def _result(task: _Task, slots: Slots) -> tuple[Chunk, Encoded | None]:
    if task.future is None:
        return task.chunk, None
    try:
        encoded, placed = task.future.result()
    except BrokenProcessPool:
        todo = "look for `Out of memory` in dmesg, then continue with --resume and fewer --workers"
        raise RunError(Problem("a worker", "was killed", "", todo)) from None
    if placed is None:
        if task.slot is not None:
            slots.release(task.slot)
        return task.chunk, encoded
    pairs = zip(encoded.blocks, slots.read(placed), strict=True)
    return task.chunk, replace(encoded, blocks=tuple(replace(block, tokens=tokens) for block, tokens in pairs))


def _start_worker(recipe: Recipe, slots: Slots, parent: int) -> None:
    """Initializes a worker. It ignores Ctrl-C, and dies with its parent."""
    global _recipe, _slots
    _recipe, _slots = recipe, slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _encode_part(slot: int | None, source: Source, identity: Identity, offset: int, size: int) -> Result:
    return _encode(slot, read_again(source, identity, offset, size), source.kind)


def _encode(slot: int | None, data: bytes, kind: Kind) -> Result:
    encoded = _recipe.encode(data, kind)
    placed = None if slot is None else _slots.write(slot, [block.tokens for block in encoded.blocks])
    if placed is None:
        return encoded, None
    none = np.zeros(0, np.uint16)
    return replace(encoded, blocks=tuple(replace(block, tokens=none) for block in encoded.blocks)), placed
