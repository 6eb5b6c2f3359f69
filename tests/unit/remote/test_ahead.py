"""Work that threads do before anybody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from tridock.remote.ahead import Ahead

WAIT_S = 10


class Jobs:
    """Jobs that note who did them; some wait until they may end, and one fails."""

    def __init__(self, *slow: str) -> None:
        self.done: list[tuple[str, bool]] = []
        self.begun = {name: threading.Event() for name in slow}
        self.may_end = threading.Event()

    def of(self, *names: str) -> dict[str, Callable[[], str]]:
        return {name: partial(self.do, name) for name in names}

    def do(self, name: str) -> str:
        self.done.append((name, threading.current_thread() is threading.main_thread()))
        if name in self.begun:
            self.begun[name].set()
            assert self.may_end.wait(WAIT_S)
        if name == "bad":
            raise ValueError(name)
        return f"result of {name}"


@pytest.mark.parametrize("on", [True, False])
def test_a_result_is_there_or_waited_for_or_made_here(on: bool) -> None:
    jobs = Jobs("b")
    ahead = Ahead(jobs.of("bad", "b", "c", "d"), 1, on=on)
    assert jobs.begun["b"].wait(WAIT_S)
    with pytest.raises(ValueError, match="bad"):
        ahead.result("bad")
    assert ahead.result("c") == "result of c"  # it does not wait for its turn
    jobs.may_end.set()
    assert ahead.result("b") == "result of b"
    assert jobs.done[:3] == [("bad", False), ("b", False), ("c", True)]
    assert ahead.result("d") == "result of d"
    assert ahead.result("d") == "result of d"
    assert jobs.done[-1] == ("d", True)  # anew


def test_threads_begin_nothing_more_once_a_result_is_asked_for() -> None:
    jobs, before = Jobs("a", "b"), set(threading.enumerate())
    ahead = Ahead(jobs.of("a", "b", "c", "d"), 2)
    assert all(event.wait(WAIT_S) for event in jobs.begun.values())
    assert ahead.result("d") == "result of d"
    jobs.may_end.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(WAIT_S)
    assert sorted(jobs.done) == [("a", False), ("b", False), ("d", True)]
    assert ahead.result("a") == "result of a"
