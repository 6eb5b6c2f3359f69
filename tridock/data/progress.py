"""How far the work is: a bar in a terminal, a line now and then elsewhere if asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tridock.data.preprocess import Done


@contextmanager
def progress_bar(what: str, log_interval: int | None = None) -> Iterator[Callable[[Done], None]]:
    """Gives a function to call as the work goes on; draws on standard error: MB/s, tokens/s, time left.

    Away from a terminal nothing is drawn (a bar in a log file is noise), but with ``log_interval`` a line is written
    whenever so many documents more are done.
    """
    console, started, told = Console(stderr=True), time.monotonic(), 0
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None, tokens="")

        def tell(done: Done) -> None:
            nonlocal told
            seconds = max(time.monotonic() - started, 1e-9)
            rate = f"{done.tokens / seconds:,.0f} tokens/s"
            progress.update(task, completed=done.bytes, total=done.total or None, tokens=rate if done.tokens else "")
            if log_interval and not console.is_terminal and done.documents // log_interval > told:
                told = done.documents // log_interval
                speed = f"{done.documents / seconds:.1f} docs/s, {done.bytes / 1e6 / seconds:.1f} MB/s, {rate}"
                print(f"Processed {done.documents} documents ({speed}).", file=sys.stderr)

        yield tell
