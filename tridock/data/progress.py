"""How far the work is: a bar in a terminal, a line now and then elsewhere if asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tridock.data.preprocess import Done


@contextmanager
def progress_bar(what: str, log_interval: int | None = None) -> Iterator[Callable[[Done], None]]:
    """Gives a function to call as the work goes on; draws on standard error: MB/s, tokens/s, time left.

    Away from a terminal nothing is drawn (a bar in a log file is noise), but with ``log_interval`` a line is written
    whenever so many documents more are done.
    """
    if sys.stderr.isatty():
        with _bar(what) as tell:
            yield tell
    else:
        yield _lines(log_interval)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[Done], None]]:
    from rich.console import Console  # not before it is needed: it takes as long as two megabytes of text
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None, tokens="")

        def tell(done: Done) -> None:
            rate = _token_rate(done, time.monotonic() - started)
            progress.update(task, completed=done.bytes, total=done.total or None, tokens=rate if done.tokens else "")

        yield tell


def _lines(log_interval: int | None) -> Callable[[Done], None]:
    started, told = time.monotonic(), 0

    def tell(done: Done) -> None:
        nonlocal told
        if log_interval and done.documents // log_interval > told:
            told = done.documents // log_interval
            seconds = max(time.monotonic() - started, 1e-9)
            speed = f"{done.documents / seconds:.1f} docs/s, {done.bytes / 1e6 / seconds:.1f} MB/s"
            print(f"Processed {done.documents} documents ({speed}, {_token_rate(done, seconds)}).", file=sys.stderr)

    return tell


def _token_rate(done: Done, seconds: float) -> str:
    return f"{done.tokens / max(seconds, 1e-9):,.0f} tokens/s"
