"""A clock that stands still while this process is stopped (Ctrl-Z) or its machine sleeps: limits on waiting go by it.

Who waits looks at it every turn. What a turn takes beyond a second did not pass here: what has come meanwhile is seen
before a limit is over.
"""

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import Final, TypeVar

T = TypeVar("T")

_TURN_S: Final = 0.5
_MOST_S: Final = 1.0


class _Clock:
    def __init__(self) -> None:
        self._lock, self._seen, self._passed = threading.Lock(), time.monotonic(), 0.0

    def now(self) -> float:
        with self._lock:
            seen = time.monotonic()
            self._passed += min(seen - self._seen, _MOST_S)
            self._seen = seen
            return self._passed


_CLOCK: Final = _Clock()


def now() -> float:
    """Returns the clock's time in seconds. Of the time since the last look, at most a second counts."""
    return _CLOCK.now()


def turn(deadline: float | None) -> float:
    """Returns how many seconds to wait before the next look, 0 from ``deadline`` on. None is no deadline."""
    return _TURN_S if deadline is None else min(_TURN_S, max(0.0, deadline - now()))


def take(queue: Queue[T] | SimpleQueue[T], seconds: float | None) -> T:
    """Returns the next item of a queue. Raises :class:`queue.Empty` if none comes within the time."""
    if seconds is None:
        return queue.get()
    deadline = now() + seconds
    while True:
        try:
            return queue.get(timeout=turn(deadline))
        except Empty:
            if now() >= deadline:
                raise


def wait(process: subprocess.Popen[bytes], deadline: float | None) -> int:
    """Returns a process's exit code. Raises :class:`subprocess.TimeoutExpired` after ``deadline`` of this clock."""
    if deadline is None:
        return process.wait()
    while True:
        try:
            return process.wait(turn(deadline))
        except subprocess.TimeoutExpired:
            if now() >= deadline:
                raise


def run(
    argv: Sequence[str],
    seconds: float | None,
    *,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    start_new_session: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a program to its end with its output captured. Without ``stdin`` it has this process's own.

    Ends it and raises :class:`subprocess.TimeoutExpired` if it takes longer than ``seconds``.
    """
    deadline, given = None if seconds is None else now() + seconds, stdin
    source = None if stdin is None else subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd,
        start_new_session=start_new_session,
    ) as process:  # fmt: skip
        try:
            while True:
                try:
                    out, errors = process.communicate(given, None if deadline is None else turn(deadline))
                except subprocess.TimeoutExpired:
                    if deadline is None or now() >= deadline:
                        raise subprocess.TimeoutExpired(argv, seconds or 0.0) from None
                    given = None
                else:
                    return subprocess.CompletedProcess(argv, process.returncode, out, errors)
        except BaseException:
            process.kill()
            raise
