"""Chunks to encoded documents on several processes; what comes out is in the order of what went in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final

import numpy as np

from tridock.data.input.sources import Chunk, Kind, Source, changed, lines_of
from tridock.data.tokenize.blocks import Encoded, Recipe
from tridock.data.tokenize.shared_memory import Placed, Slots
from tridock.errors import Problem, RunError

_PR_SET_PDEATHSIG: Final = 1
_SLOT_BYTES: Final = 6 << 20
"""More than the tokens of a chunk take; those of a long line go through a pipe."""
_recipe: Recipe
_slots: Slots
Result = tuple[Encoded, Placed | None]


@dataclass(frozen=True, slots=True)
class _Task:
    """A chunk and the worker at it, if it needs one; ``slot`` is where its tokens may be put."""

    chunk: Chunk
    future: Future[Result] | None = None
    slot: int | None = None


def encode_in_order(recipe: Recipe, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded | None]]:
    """Each chunk with its documents; None for one without lines, or with a line that is cut off.

    One worker works in this process. At most two chunks a worker are under way. Lines that lie in a file as they are
    are read there by the worker: they do not go through this process's hands twice.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, None if _idle(chunk) else recipe.encode(chunk.data, chunk.source.kind)
        return
    # Forked: the tokenizer is shared and not loaded again. No thread of ours runs yet, and no worker touches the
    # libraries' own threads.
    context = multiprocessing.get_context("fork")
    # Those of the chunks under way, and of the few whose tokens are still to be written and hashed.
    slots = Slots(2 * workers + 4, _SLOT_BYTES)
    pool = ProcessPoolExecutor(workers, context, _start, (recipe, slots, os.getpid()))
    under_way: deque[_Task] = deque()
    try:
        _fork_all(pool)
        for chunk in chunks:
            under_way.append(_given(chunk, pool, slots))
            if len(under_way) >= 2 * workers:
                yield _finished(under_way.popleft(), slots)
        while under_way:
            yield _finished(under_way.popleft(), slots)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _fork_all(pool: ProcessPoolExecutor) -> None:
    """Now, before the reading starts threads. A Ctrl-C on the way waits: it would leave a pool that cannot be ended.

    Or be lost: what is raised in a function that Python calls around a fork is only printed. To block the signal would
    not do, for it then comes to a thread of a library, and Python raises it in the main thread all the same.
    """
    came: list[tuple[int, FrameType | None]] = []
    asked = threading.current_thread() is threading.main_thread()  # no other is told of signals
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame))) if asked else None
    try:
        pool.submit(int).result()
    finally:
        if asked:
            signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(*came[0])


def _given(chunk: Chunk, pool: ProcessPoolExecutor, slots: Slots) -> _Task:
    """The chunk, and a worker at it."""
    if _idle(chunk):
        return _Task(chunk)
    slot = slots.take()
    if chunk.plain:
        part = lines_of(chunk)
        return _Task(replace(chunk, data=b""), pool.submit(_encode_part, slot, chunk.source, *part), slot)
    return _Task(chunk, pool.submit(_encode, slot, chunk.data, chunk.source.kind), slot)


def _idle(chunk: Chunk) -> bool:
    return not chunk.data or chunk.broken is not None


def _finished(task: _Task, slots: Slots) -> tuple[Chunk, Encoded | None]:
    if task.future is None:
        return task.chunk, None
    try:
        encoded, placed = task.future.result()
    except BrokenProcessPool:
        todo = "look for `Out of memory` in dmesg; then go on with --resume and fewer --workers"
        raise RunError(Problem("a worker", "was killed", "", todo)) from None
    if placed is None:
        if task.slot is not None:
            slots.give(task.slot)
        return task.chunk, encoded
    pairs = zip(encoded.blocks, slots.taken(placed), strict=True)
    return task.chunk, replace(encoded, blocks=tuple(replace(block, tokens=tokens) for block, tokens in pairs))


def _start(recipe: Recipe, slots: Slots, parent: int) -> None:
    """A worker leaves Ctrl-C to the process that started it, and ends with it, however that ends."""
    global _recipe, _slots
    _recipe, _slots = recipe, slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _encode_part(slot: int | None, source: Source, name: str, offset: int, size: int) -> Result:
    with Path(name).open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), size, offset)
    if len(data) != size:
        raise changed(source)
    return _encode(slot, data, source.kind)


def _encode(slot: int | None, data: bytes, kind: Kind) -> Result:
    encoded = _recipe.encode(data, kind)
    placed = None if slot is None else _slots.put(slot, [block.tokens for block in encoded.blocks])
    if placed is None:
        return encoded, None
    none = np.zeros(0, np.uint16)
    return replace(encoded, blocks=tuple(replace(block, tokens=none) for block in encoded.blocks)), placed
