"""Work of the main thread, done in another: Ctrl-C strikes the one that waits, never the one that holds a lock.

Python raises KeyboardInterrupt between any two steps of the main thread. paramiko takes its locks by hand, and one
struck between taking a lock and the ``try`` that gives it back leaves it taken: the next to want it waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

T = TypeVar("T")
_GRACE_S: Final = 2.0


class _Task(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


def aside(work: Callable[[], T], give_up: Callable[[], object] | None = None) -> T:
    """What ``work`` returns or raises, done in a thread of its own if this is the main thread.

    At Ctrl-C ``give_up`` is called, also aside; the work has two seconds to end by it, and is then left behind.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = _Task(work)
    task.start()
    try:
        task.join()
    except BaseException:
        if give_up is not None:
            closing = _Task(give_up)
            closing.start()
            closing.join(_GRACE_S)
            task.join(_GRACE_S)
        raise
    return task.result()
