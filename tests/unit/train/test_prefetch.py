"""Batches are read one ahead, come in the order in which they are asked for, and bring their errors with them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.patience import STEP_S
from tridock.errors import Problem, RequestError
from tridock.train.data.dataset import Samples
from tridock.train.data.prefetch import Prefetcher

CPU = torch.device("cpu")
TRAIN, VALID = (Samples(name, np.arange(100), 4, 100, 1) for name in ("train", "valid"))


class Reader:
    """Notes what is read, and by whom."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.threads: set[int] = set()
        self.done = threading.Semaphore(0)

    def __call__(self, samples: Samples, first: int) -> Iterator[NDArray[Any]]:
        self.seen.append((samples.name, first))
        self.threads.add(threading.get_ident())
        if first == 13:
            raise RequestError(Problem("data", "is spoilt", "13", "correct it"))
        yield np.full((2, 3), first)
        yield np.full((2, 3), first + 1)
        self.done.release()


def test_the_next_batch_is_read_before_it_is_asked_for() -> None:
    reader = Reader()
    prefetcher = Prefetcher(reader, CPU)
    batches = prefetcher.get(TRAIN, 0, 8)
    assert [batch.tolist() for batch in batches] == [[[0] * 3] * 2, [[1] * 3] * 2]
    assert all(reader.done.acquire(timeout=STEP_S) for _ in range(2))
    assert reader.seen == [("train", 0), ("train", 8)]
    assert prefetcher.get(TRAIN, 8, None)[0][0, 0] == 8
    assert reader.seen == [("train", 0), ("train", 8)]  # once each, and nothing after the last
    assert threading.get_ident() not in reader.threads
    assert len(reader.threads) == 1


def test_an_evaluation_in_between_takes_nothing_away() -> None:
    reader = Reader()
    prefetcher = Prefetcher(reader, CPU)
    prefetcher.get(TRAIN, 0, 8)
    assert prefetcher.get(VALID, 0, 8)[0][0, 0] == 0
    assert prefetcher.get(VALID, 8, None)[0][0, 0] == 8
    assert prefetcher.get(TRAIN, 8, None)[0][0, 0] == 8
    assert sorted(reader.seen) == [("train", 0), ("train", 8), ("valid", 0), ("valid", 8)]


def test_an_error_comes_with_its_batch() -> None:
    prefetcher = Prefetcher(Reader(), CPU)
    assert prefetcher.get(TRAIN, 5, 13)[0][0, 0] == 5
    with pytest.raises(RequestError) as caught:
        prefetcher.get(TRAIN, 13, None)
    assert str(caught.value) == "data: is spoilt; got 13; correct it"
    assert prefetcher.get(TRAIN, 21, None)[0][0, 0] == 21  # the thread lives on


def test_ctrl_c_does_not_wait_for_what_is_read() -> None:
    """The main thread waits where a signal reaches it."""
    released = threading.Event()
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))

    def read(samples: Samples, first: int) -> Iterator[NDArray[Any]]:
        timer.start()
        released.wait(STEP_S)
        yield np.zeros((1, 1))

    try:
        with pytest.raises(KeyboardInterrupt):
            Prefetcher(read, CPU).get(TRAIN, 0, None)
    finally:
        released.set()
        timer.join()
