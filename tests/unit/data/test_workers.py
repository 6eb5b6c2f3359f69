"""The moment in which the workers start; what they do is tested with preprocess."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from tridock.data.tokenize.blocks import _fork_workers


class Pool:
    """Starts nothing, and is interrupted in it."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def submit(self, _function: Callable[[], int]) -> Future[int]:
        os.kill(os.getpid(), signal.SIGINT)
        self.steps.append("all forked")
        done: Future[int] = Future()
        done.set_result(0)
        return done


def test_ctrl_c_while_they_start_comes_when_they_have() -> None:
    pool, handler = Pool(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _fork_workers(pool)  # type: ignore[arg-type]
    assert pool.steps == ["all forked"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_thread_starts_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr(os, "kill", lambda *_: None)
    thread = threading.Thread(target=_fork_workers, args=(pool,))
    thread.start()
    thread.join()
    assert pool.steps == ["all forked"]
