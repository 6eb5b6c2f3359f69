"""Encodes chunks in several processes and in order. Each has a pipe: for lines, or where they are, and for tokens."""

import ctypes
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from tridock import interrupts
from tridock.data.input.sources import Chunk, Kind, lines_of, read_again
from tridock.data.tokenize.blocks import Encoded, Recipe
from tridock.errors import Problem, RunError, TridockError, reason_of

_PR_SET_PDEATHSIG: Final = 1
_IN_FLIGHT: Final = 4
"""Chunks per worker that are sent or whose results wait. With two, workers wait for this process on a busy machine."""
_SEND_S: Final = 3e-4
"""Processor seconds to send a chunk to a worker and to receive the result."""
_SMALL: Final = 16 << 10
_TRIES: Final = 8
"""Number of small chunks that measure the encoder's speed; the first may include loading time."""
Result = Encoded | Exception


def encode_in_order(recipe: Recipe, chunks: Iterator[Chunk], workers: int) -> Generator[tuple[Chunk, Encoded | None]]:
    """Yields each chunk with its documents; None for a chunk without lines, or with a truncated line.

    With one worker this process encodes. Workers read the lines of uncompressed files themselves; this process encodes
    chunks that take longer to send than to encode, such as small files. Closing the generator ends the workers.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, None if _has_no_lines(chunk) else recipe.encode(chunk.data, chunk.source.kind)
        return
    in_flight_at_most = _IN_FLIGHT * workers
    pool: list[_Worker] = []
    in_flight: deque[_Task] = deque()
    here = _Here(recipe)
    try:
        _start_workers(lambda: pool.extend(_Worker(recipe) for _ in range(workers)))
        for chunk in chunks:
            in_flight.append(here.encode(chunk) if here.is_quicker(chunk) else _submit(chunk, pool))
            if len(in_flight) >= in_flight_at_most:
                yield _result(in_flight.popleft())
        while in_flight:
            yield _result(in_flight.popleft())
    finally:
        # Kills the workers, whose results are useless now: nothing, not even a second Ctrl-C, has to wait for them.
        for worker in pool:
            worker.process.kill()
        for worker in pool:
            worker.process.join()


class _Here:
    """Encodes small chunks in this process, once the encoder has proved fast enough."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._tries, self._seconds_per_byte = 0, math.inf

    def is_quicker(self, chunk: Chunk) -> bool:
        size = len(chunk.data)
        if size > _SMALL or _has_no_lines(chunk):
            return False
        return self._tries < _TRIES or size * self._seconds_per_byte < _SEND_S

    def encode(self, chunk: Chunk) -> "_Task":
        began = time.process_time()
        result: Result
        try:
            result = self._recipe.encode(chunk.data, chunk.source.kind)
        except Exception as error:
            result = error
        self._tries += 1
        self._seconds_per_byte = min(self._seconds_per_byte, (time.process_time() - began) / len(chunk.data))
        return _Task(replace(chunk, data=b""), result=result)


class _Worker:
    """A forked process that encodes the lines of one chunk after another."""

    def __init__(self, recipe: Recipe) -> None:
        # Forks, to share the tokenizer. Tridock has no other thread yet, and no worker uses a library's threads.
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, recipe, os.getpid()), daemon=True)
        self.process.start()
        other.close()  # the last copy outside the worker: its end is noticed
        self.pending: deque[_Task] = deque()

    def call(self, task: "_Task", lines: bytes | partial[bytes], kind: Kind) -> None:
        """Sends lines, or the call that reads them, to the worker, and receives pending results before lines.

        Otherwise this process and the worker could wait for each other. A call is so small that it never blocks.
        """
        while isinstance(lines, bytes) and self.pending:
            self.receive()
        with _killed_is_an_error():
            self._connection.send((lines, kind))
        self.pending.append(task)
        task.worker = self

    def receive(self) -> None:
        """Waits for the result of the oldest call."""
        with _killed_is_an_error():
            result = self._connection.recv()
        self.pending.popleft().result = result

    def receive_ready(self) -> None:
        while self.pending and self._connection.poll():
            self.receive()


@dataclass(slots=True)
class _Task:
    """A chunk, the worker that encodes it, and the result."""

    chunk: Chunk
    worker: _Worker | None = None
    result: Result | None = None


@contextmanager
def _killed_is_an_error() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        todo = "look for `Out of memory` in dmesg, then continue with --resume and fewer --workers"
        raise RunError(Problem("a worker", "was killed", "", todo)) from None


def _start_workers(start: Callable[[], None]) -> None:
    """Calls ``start``, and delays Ctrl-C until all workers run.

    Without this Ctrl-C could be lost: Python only prints an exception raised in a function that it calls around a fork.
    """
    with interrupts.delayed():
        try:
            start()
        except OSError as error:
            raise RunError(Problem("a worker", "cannot be started", reason_of(error), "give fewer --workers")) from None


def _submit(chunk: Chunk, pool: list[_Worker]) -> _Task:
    if _has_no_lines(chunk):
        return _Task(chunk)
    for worker in pool:
        worker.receive_ready()
    worker, task = min(pool, key=lambda worker: len(worker.pending)), _Task(replace(chunk, data=b""))
    lines = chunk.data if chunk.plain is None else partial(read_again, chunk.source, *lines_of(chunk))
    worker.call(task, lines, chunk.source.kind)
    return task


def _has_no_lines(chunk: Chunk) -> bool:
    return not chunk.data or chunk.broken is not None


def _result(task: _Task) -> tuple[Chunk, Encoded | None]:
    while task.result is None:
        if task.worker is None:
            return task.chunk, None
        task.worker.receive()
    if isinstance(task.result, Exception):
        raise task.result
    return task.chunk, task.result


def _serve(connection: Connection, recipe: Recipe, parent: int) -> None:
    """Encodes in a worker. Ignores Ctrl-C, and dies with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    while True:
        lines, kind = connection.recv()
        result: Result
        try:
            result = recipe.encode(lines if isinstance(lines, bytes) else lines(), kind)
        except Exception as error:
            if not isinstance(error, TridockError):
                error.add_note(traceback.format_exc())  # the traceback is not sent with the exception
            result = error
        connection.send(result)
