"""Progress of long work on standard error: bars in a terminal, otherwise occasional lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_S: Final = 10.0
"""Seconds between two lines about the same work. Shorter work prints no line."""


class Bar(Protocol):
    """Work measured in bytes or units. A call adds what was done since the last call."""

    def __call__(self, count: int, note: str | None = None) -> None: ...

    def set(self, done: int, total: int | None, note: str = "") -> None:
        """Sets the total done so far, with ``note`` beside it."""

    def end(self) -> None:
        """Removes the bar when the work is done."""


Bars = Callable[..., Bar]
"""``begin(what, size, *, unit="")`` begins a bar of ``size`` bytes, or of ``size`` units; None is unknown."""


@contextmanager
def bars(*, quiet: bool = False) -> Iterator[Bars]:
    """Yields a function that begins bars. ``quiet`` suppresses all progress."""
    if quiet:
        yield lambda what, *_, **__: _Line(what, None, silent=True)
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(*_columns(), console=Console(stderr=True), transient=True) as progress:
            yield lambda what, size, *, unit="": _Shown(
                progress, progress.add_task(what, total=size, note="", unit=unit)
            )
    else:
        yield lambda what, size, *, unit="": _Line(what, size, unit)


def _columns() -> tuple[Any, ...]:
    from rich.progress import BarColumn, DownloadColumn, Task, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column
    from rich.text import Text

    class Amount(DownloadColumn):
        def render(self, task: Task) -> Text:
            whole = "?" if task.total is None else f"{task.total:,.0f}"
            unit = task.fields["unit"]
            return Text(f"{task.completed:,.0f}/{whole} {unit}") if unit else super().render(task)

    class Speed(TransferSpeedColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return super().render(task) if not task.fields["unit"] else Text(f"{speed:,.0f}/s" if speed else "?")

    text = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    note = TextColumn("{task.fields[note]}")
    return text, BarColumn(20), Amount(), Speed(), note, TimeRemainingColumn()


@dataclass(frozen=True, slots=True)
class _Shown:
    """A bar in a terminal."""

    progress: Progress
    task: TaskID

    def __call__(self, count: int, note: str | None = None) -> None:
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self.progress.update(self.task, advance=count, **fields)

    def set(self, done: int, total: int | None, note: str = "") -> None:
        self.progress.update(self.task, completed=done, total=total, note=note)

    def end(self) -> None:
        self.progress.remove_task(self.task)


@dataclass(slots=True)
class _Line:
    """Progress as lines, for a pipe or file: one every ten seconds."""

    what: str
    size: int | None
    unit: str = ""
    done: int = 0
    silent: bool = False
    began: float = field(default_factory=lambda: time.monotonic())
    printed: float = field(default_factory=lambda: time.monotonic())
    note: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, count: int, note: str | None = None) -> None:
        with self.lock:  # several hosts' threads
            self.done += count
            self.note = self.note if note is None else note
            self._print()

    def set(self, done: int, total: int | None, note: str = "") -> None:
        with self.lock:
            self.done, self.size, self.note = done, total, note
            self._print()

    def end(self) -> None:
        """Prints nothing: the command itself reports the result."""

    def _print(self) -> None:
        now = time.monotonic()
        if self.silent or now - self.printed < LINE_S:
            return
        self.printed = now
        if self.unit:
            amount = f"{self.done:,}" + (f" of {self.size:,}" if self.size else "") + f" {self.unit}"
        else:
            amount = size_text(self.done) + (f" of {size_text(self.size)}" if self.size else "")
        note = f", {self.note}" if self.note else ""
        print(f"{self.what}: {amount} after {now - self.began:.0f} s{note}", file=sys.stderr, flush=True)


def size_text(size: int) -> str:
    """Returns bytes as text: ``1.5 GB``, ``20.0 MB``, ``12 kB``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"
