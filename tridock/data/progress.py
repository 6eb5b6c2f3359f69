"""Progress on standard error: a bar in a terminal, otherwise lines if requested."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tridock.progress import bars


@dataclass(frozen=True, slots=True)
class Done:
    """Progress so far. ``bytes`` are those read from disk; ``total`` is 0 if unknown."""

    bytes: int
    total: int
    documents: int
    tokens: int


Progress = Callable[[Done], None]


@contextmanager
def progress_bar(
    what: str, log_interval: int | None = None, *, quiet: bool = False
) -> Iterator[Callable[[Done], None]]:
    """Yields a function that shows progress: MB/s, tokens/s and remaining time; ``quiet`` shows nothing.

    Without a terminal a line is printed every ten seconds, or with ``log_interval`` every ``log_interval`` documents.
    """
    if log_interval and not quiet and not sys.stderr.isatty():
        yield _lines(log_interval)
        return
    started = time.monotonic()
    with bars(quiet=quiet) as begin:
        bar = begin(what, None)

        def report(done: Done) -> None:
            rate = _token_rate(done, time.monotonic() - started) if done.tokens else ""
            bar.set(done.bytes, done.total or None, rate)

        yield report


def _lines(log_interval: int | None) -> Callable[[Done], None]:
    started, reported = time.monotonic(), 0

    def report(done: Done) -> None:
        nonlocal reported
        if log_interval and done.documents // log_interval > reported:
            reported = done.documents // log_interval
            seconds = max(time.monotonic() - started, 1e-9)
            speed = f"{done.documents / seconds:.1f} docs/s, {done.bytes / 1e6 / seconds:.1f} MB/s"
            print(f"Processed {done.documents} documents ({speed}, {_token_rate(done, seconds)}).", file=sys.stderr)

    return report


def _token_rate(done: Done, seconds: float) -> str:
    return f"{done.tokens / max(seconds, 1e-9):,.0f} tokens/s"
