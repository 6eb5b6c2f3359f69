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
from typing import Final

from tridock.data.blocks import Encoded, Recipe
from tridock.data.sources import Chunk, Kind
from tridock.errors import Problem, RunError

_PR_SET_PDEATHSIG: Final = 1
_recipe: Recipe


def encode_in_order(recipe: Recipe, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded | None]]:
    """Each chunk with its documents; None for one without lines, or with a line that is cut off.

    One worker works in this process. At most two chunks a worker are under way.
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
        for chunk in chunks:
            under_way.append((chunk, None if _idle(chunk) else pool.submit(_encode, chunk.data, chunk.source.kind)))
            if len(under_way) >= 2 * workers:
                yield _finished(under_way)
        while under_way:
            yield _finished(under_way)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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


def _encode(data: bytes, kind: Kind) -> Encoded:
    return _recipe.encode(data, kind)
