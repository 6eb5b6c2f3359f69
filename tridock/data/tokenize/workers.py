"""Encodes chunks in several processes and in order. Lines and token ids travel through shared memory."""

import ctypes
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import FrameType
from typing import Final

import numpy as np

from tridock.data.input.sources import Chunk, Identity, Kind, Source, lines_of, read_again
from tridock.data.tokenize.blocks import Encoded, Recipe
from tridock.data.tokenize.shared_memory import SlotArrays, Slots
from tridock.errors import Problem, RunError, TridockError

_PR_SET_PDEATHSIG: Final = 1
_SLOT_BYTES: Final = 6 << 20
"""Bytes of a slot, more than a chunk and its tokens need; a very long line and its tokens go through a pipe."""
_IN_FLIGHT: Final = 4
"""Chunks per worker that are sent or whose results wait. With two, workers wait for this process on a busy machine."""
_SEND_S: Final = 3e-4
"""Processor seconds to send a chunk to a worker and to receive the result."""
_SMALL: Final = 16 << 10
_TRIES: Final = 8
"""Number of small chunks that measure the encoder's speed; the first may include loading time."""
_recipe: Recipe
_slots: Slots
Result = tuple[Encoded, SlotArrays | None]


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
    # Slots for the chunks in flight, and for a few whose tokens are being written and hashed.
    slots = Slots(in_flight_at_most + 4, _SLOT_BYTES)
    pool: list[_Worker] = []
    in_flight: deque[_Task] = deque()
    here = _Here(recipe)
    try:
        _start_workers(lambda: pool.extend(_Worker(recipe, slots) for _ in range(workers)))
        for chunk in chunks:
            in_flight.append(here.encode(chunk) if here.is_quicker(chunk) else _submit(chunk, pool, slots))
            if len(in_flight) >= in_flight_at_most:
                yield _result(in_flight.popleft(), slots)
        while in_flight:
            yield _result(in_flight.popleft(), slots)
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
        result: Result | Exception
        try:
            result = self._recipe.encode(chunk.data, chunk.source.kind), None
        except Exception as error:
            result = error
        self._tries += 1
        self._seconds_per_byte = min(self._seconds_per_byte, (time.process_time() - began) / len(chunk.data))
        return _Task(replace(chunk, data=b""), result=result)


class _Worker:
    """A forked process that runs one call after another."""

    def __init__(self, recipe: Recipe, slots: Slots) -> None:
        # Forks, to share the tokenizer. Tridock has no other thread yet, and no worker uses a library's threads.
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, recipe, slots, os.getpid()), daemon=True)
        self.process.start()
        other.close()  # the last copy outside the worker: its end is noticed
        self.pending: deque[_Task] = deque()

    def call(self, task: "_Task", large: bool, function: Callable[..., Result], *arguments: object) -> None:
        """Sends a call to the worker, and receives pending results before a ``large`` one.

        Otherwise this process and the worker could wait for each other. A small call never blocks.
        """
        while large and self.pending:
            self.receive()
        with _killed_is_an_error():
            self._connection.send((function, arguments))
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
    """A chunk, the slot for its tokens, the worker that encodes it, and the result."""

    chunk: Chunk
    slot: int | None = None
    worker: _Worker | None = None
    result: Result | Exception | None = None


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
    Blocking the signal does not help: a library's thread would get it, and Python would still raise it in the main
    thread.
    """
    received: list[tuple[int, FrameType | None]] = []
    in_main_thread = threading.current_thread() is threading.main_thread()  # only it handles signals
    handler = (
        signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame))) if in_main_thread else None
    )
    try:
        start()
    except OSError as error:
        got = error.strerror or str(error)
        raise RunError(Problem("a worker", "cannot be started", got, "give fewer --workers")) from None
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
    if received and callable(handler):
        handler(*received[0])


def _submit(chunk: Chunk, pool: list[_Worker], slots: Slots) -> _Task:
    if _has_no_lines(chunk):
        return _Task(chunk)
    for worker in pool:
        worker.receive_ready()
    worker = min(pool, key=lambda worker: len(worker.pending))
    slot, kind = slots.acquire(), chunk.source.kind
    task = _Task(replace(chunk, data=b""), slot)
    if chunk.plain is not None:
        worker.call(task, False, _encode_part, slot, chunk.source, *lines_of(chunk))
    elif slot is not None and slots.write_bytes(slot, chunk.data):
        worker.call(task, False, _encode_placed, slot, len(chunk.data), kind)
    else:
        worker.call(task, True, _encode, slot, chunk.data, kind)
    return task


def _has_no_lines(chunk: Chunk) -> bool:
    return not chunk.data or chunk.broken is not None


def _result(task: _Task, slots: Slots) -> tuple[Chunk, Encoded | None]:
    while task.result is None:
        if task.worker is None:
            return task.chunk, None
        task.worker.receive()
    if isinstance(task.result, Exception):
        raise task.result
    encoded, placed = task.result
    if placed is None:
        if task.slot is not None:
            slots.release(task.slot)
        return task.chunk, encoded
    pairs = zip(encoded.blocks, slots.read(placed), strict=True)
    return task.chunk, replace(encoded, blocks=tuple(replace(block, tokens=tokens) for block, tokens in pairs))


def _serve(connection: Connection, recipe: Recipe, slots: Slots, parent: int) -> None:
    """Answers calls in a worker. Ignores Ctrl-C, and dies with its parent."""
    global _recipe, _slots
    _recipe, _slots = recipe, slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    while True:
        function, arguments = connection.recv()
        result: Result | Exception
        try:
            result = function(*arguments)
        except Exception as error:
            if not isinstance(error, TridockError):
                error.add_note(traceback.format_exc())  # the traceback is not sent with the exception
            result = error
        connection.send(result)


def _encode_part(slot: int | None, source: Source, identity: Identity, offset: int, size: int) -> Result:
    return _encode(slot, read_again(source, identity, offset, size), source.kind)


def _encode_placed(slot: int, size: int, kind: Kind) -> Result:
    return _encode(slot, _slots.read_bytes(slot, size), kind)


def _encode(slot: int | None, data: bytes, kind: Kind) -> Result:
    encoded = _recipe.encode(data, kind)
    placed = None if slot is None else _slots.write(slot, [block.tokens for block in encoded.blocks])
    if placed is None:
        return encoded, None
    none = np.zeros(0, np.uint16)
    return replace(encoded, blocks=tuple(replace(block, tokens=none) for block in encoded.blocks)), placed
