"""Work that is done for many hosts before anybody asks for it, while modules load."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The result of one job per name. Threads work on them from now on, in order, until somebody asks for a result."""

    def __init__(self, jobs: Mapping[str, Callable[[], T]], threads: int, *, on: bool = False) -> None:
        """``on``: the threads go on after that."""
        self._jobs, self._on, self._asked = jobs, on, False
        self._results = {name: Future[T]() for name in jobs}
        self._waiting = dict.fromkeys(jobs)
        for _ in range(min(threads, len(jobs))):
            threading.Thread(target=self._work, daemon=True).start()

    def result(self, name: str) -> T:
        """Returns or raises what the job does. Does it here if no thread has begun it, or if it has been asked for."""
        self._asked = True
        result = self._results.pop(name, None)
        if result is None or self._take(name):
            return self._jobs[name]()
        return result.result()

    def _work(self) -> None:
        for name in self._jobs:
            if self._asked and not self._on:
                return
            result = self._results.get(name)
            if result is not None and self._take(name):
                try:
                    result.set_result(self._jobs[name]())
                except BaseException as error:
                    result.set_exception(error)

    def _take(self, name: str) -> bool:
        """Whether the caller is the first to begin a job."""
        with suppress(KeyError):
            del self._waiting[name]
            return True
        return False
