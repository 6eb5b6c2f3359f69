"""The worker processes: how they start and end. What they encode is tested with preprocess."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing

import numpy as np
import pytest

from tridock.data.input.sources import Chunk, Kind, Source
from tridock.data.tokenize import workers as workers_module
from tridock.data.tokenize.blocks import Recipe
from tridock.data.tokenize.encoders import Ids
from tridock.data.tokenize.workers import _start_workers, encode_in_order
from tridock.errors import RunError


class Workers:
    """Starts nothing, and is interrupted in it."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.steps.append("all started")


def test_ctrl_c_while_they_start_comes_when_they_have() -> None:
    workers, handler = Workers(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _start_workers(workers.start)
    assert workers.steps == ["all started"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_thread_starts_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()
    monkeypatch.setattr(os, "kill", lambda *_: None)
    thread = threading.Thread(target=_start_workers, args=(workers.start,))
    thread.start()
    thread.join()
    assert workers.steps == ["all started"]


class Characters:
    """Encodes a text as its characters."""

    name, sha256 = "characters", ""
    vocab_size = largest_id = end_of_document = 127
    always_closed = False

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("ascii"), np.uint8).astype(np.uint32) for text in texts]


def test_large_lines_and_results_never_wait_for_each_other() -> None:
    """Both are larger than a pipe holds."""
    source = Source("a", None, Kind.TEXT)
    lines = [b"%d" % (number % 10) * 500_000 for number in range(12)]
    chunks = (Chunk(source, 0, n + 1, line, 1, 0, Future(), 0) for n, line in enumerate(lines))
    found = []
    with closing(encode_in_order(Recipe(Characters(), ("text",), False), chunks, 2)) as encoded:
        for chunk, done in encoded:
            assert done is not None
            found.append((chunk.first_line, done.blocks[0].tokens.astype(np.uint8).tobytes()))
    assert found == list(enumerate(lines, 1))
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_between_two_chunks() -> None:
    chunk = Chunk(Source("a", None, Kind.TEXT), 0, 1, b"a" * 50_000, 1, 0, Future(), 0)

    def chunks() -> Iterator[Chunk]:
        yield from [chunk] * 4
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        yield from [chunk] * 4

    with pytest.raises(RunError) as caught:
        list(encode_in_order(Recipe(Characters(), ("text",), False), chunks(), 2))
    assert str(caught.value).startswith("a worker: was killed; ")


def test_an_unexpected_error_of_a_worker_names_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Characters, "encode", lambda self, texts: 1 / 0)
    chunk = Chunk(Source("a", None, Kind.TEXT), 0, 1, b"a" * 50_000, 1, 0, Future(), 0)
    with pytest.raises(ZeroDivisionError) as caught:
        list(encode_in_order(Recipe(Characters(), ("text",), False), iter([chunk]), 2))
    assert "in encode\n" in caught.value.__notes__[0]


class Slow(Characters):
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        time.sleep(0.002)
        return super().encode(texts)


@pytest.mark.parametrize("encoder", [Characters, Slow])
def test_a_chunk_that_costs_less_than_to_send_it_is_encoded_here(
    encoder: type[Characters], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    call = workers_module._Worker.call
    monkeypatch.setattr(workers_module._Worker, "call", lambda *arguments: (sent.append(1), call(*arguments))[1])
    monkeypatch.setattr(workers_module, "_SEND_S", 0.001)
    monkeypatch.setattr(workers_module.time, "process_time", lambda: clock.__next__())
    # Each reading is one later of this clock: an encoder takes what its name says, also on a busy machine.
    clock = itertools.count(0.0, 0.002 if encoder is Slow else 0.0)
    source = Source("a", None, Kind.TEXT)
    chunks = (Chunk(source, 0, n, b"%d" % n, 1, 0, Future(), 0) for n in range(50))
    with closing(encode_in_order(Recipe(encoder(), ("text",), False), chunks, 2)) as encoded:
        found = [
            (chunk.first_line, done.blocks[0].tokens.astype(np.uint8).tobytes()) for chunk, done in encoded if done
        ]
    assert found == [(n, b"%d" % n) for n in range(50)]
    assert len(sent) == (42 if encoder is Slow else 0)


def test_an_error_comes_at_its_place_also_from_here() -> None:
    source = Source("a", None, Kind.TEXT)
    chunks = (Chunk(source, 0, n, b"\xc3\xa4" if n == 5 else b"a", 1, 0, Future(), 0) for n in range(9))
    found = []
    with closing(encode_in_order(Recipe(Characters(), ("text",), False), chunks, 2)) as encoded:
        for number in range(5):
            found.append(next(encoded)[0].first_line)
            assert found[-1] == number
        with pytest.raises(UnicodeEncodeError):
            next(encoded)
