"""Chunks to encoded documents on several processes; what comes out is in the order of what went in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.data.blocks import Encoded, Recipe
from tridock.data.sources import Chunk, Kind, Source, changed, lines_of
from tridock.errors import Problem, RunError

_PR_SET_PDEATHSIG: Final = 1
_recipe: Recipe


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
    pool = ProcessPoolExecutor(workers, context, _start, (recipe, os.getpid()))
    under_way: deque[tuple[Chunk, Future[Encoded] | None]] = deque()
    try:
        _fork_all(pool)
        for chunk in chunks:
            under_way.append(_given(chunk, pool))
            if len(under_way) >= 2 * workers:
                yield _finished(under_way)
        while under_way:
            yield _finished(under_way)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _fork_all(pool: ProcessPoolExecutor) -> None:
    """Now, before the reading starts threads. A Ctrl-C on the way waits: it would leave a pool that cannot be ended."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool.submit(int).result()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _given(chunk: Chunk, pool: ProcessPoolExecutor) -> tuple[Chunk, Future[Encoded] | None]:
    """The chunk, and a worker at it."""
    if _idle(chunk):
        return chunk, None
    if chunk.plain:
        return replace(chunk, data=b""), pool.submit(_encode_part, chunk.source, *lines_of(chunk))
    return chunk, pool.submit(_encode, chunk.data, chunk.source.kind)


def _idle(chunk: Chunk) -> bool:
    return not chunk.data or chunk.broken is not None


def _finished(under_way: deque[tuple[Chunk, Future[Encoded] | None]]) -> tuple[Chunk, Encoded | None]:
    chunk, future = under_way.popleft()
    try:
        return chunk, None if future is None else future.result()
    except BrokenProcessPool:
        todo = "look for `Out of memory` in dmesg; then go on with --resume and fewer --workers"
        raise RunError(Problem("a worker", "was killed", "", todo)) from None


def _start(recipe: Recipe, parent: int) -> None:
    """A worker leaves Ctrl-C to the process that started it, and ends with it, however that ends."""
    global _recipe
    _recipe = recipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _encode_part(source: Source, name: str, offset: int, size: int) -> Encoded:
    with Path(name).open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), size, offset)
    if len(data) != size:
        raise changed(source)
    return _encode(data, source.kind)


def _encode(data: bytes, kind: Kind) -> Encoded:
    return _recipe.encode(data, kind)
