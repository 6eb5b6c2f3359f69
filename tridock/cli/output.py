"""Output of the subcommands: text that can be copied, and tables whose cells are never truncated."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNBOUNDED: Final = 10_000
_FOLDED: Final = 12
"""Least width of a column with ``overflow="fold"``, whose text may be split anywhere. Others are split at spaces."""


def say(text: str) -> None:
    """Prints a line of results to standard output."""
    # Not through Rich, which would highlight paths and interpret brackets.
    print(text, flush=True)


def print_problems(problems: Sequence[Mapping[str, Any]], **others: Any) -> None:
    """Prints the JSON object of a command with ``--json`` that is refused."""
    say(json.dumps({"problems": problems, **others}, indent=2, allow_nan=False))


def console() -> Console:
    """Returns a Rich console that neither highlights nor wraps."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_tables(*tables: Table) -> None:
    sys.stdout.write(_text_of(tables))
    sys.stdout.flush()


def redraw_tables(*tables: Table, note: str) -> None:
    """Replaces the terminal's content with the tables and a note, in one write to avoid flicker."""
    shown = console()
    with shown.capture() as captured:
        shown.clear()
    sys.stdout.write(captured.get() + _text_of(tables) + note)
    sys.stdout.flush()


def _text_of(tables: Iterable[Table]) -> str:
    from rich.console import Console

    shown, texts = console(), []
    for table in tables:
        wide = Console(highlight=False, soft_wrap=True, width=_set_widths(table, shown))
        with wide.capture() as captured:
            wide.print(table)
        texts.append(captured.get())
    return "".join(texts)


def _set_widths(table: Table, shown: Console) -> int:
    """Sets the widths of the columns and returns the width to print the table at.

    A pipe gets each row on one line. In a narrow terminal texts wrap at spaces, and if that is not enough the frame
    is left out. A table that still does not fit has a line for each row, which the terminal wraps.
    """
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement

    wide = shown.options.update(width=_UNBOUNDED)
    sizes = [[Measurement.get(shown, wide, cell) for cell in (one.header, *one.cells)] for one in table.columns]
    natural = [max(size.maximum for size in column) for column in sizes]
    widths = [max(size.minimum for size in column) for column in sizes]
    folded = [column.overflow == "fold" for column in table.columns]
    widths = [min(width, _FOLDED) if fold else width for width, fold in zip(widths, folded, strict=True)]

    def missing(number: int) -> tuple[bool, float]:
        """Sort key of a column's need for width: unfolded columns first, then those with the most lines."""
        return (not folded[number] and natural[number] > widths[number], natural[number] / max(widths[number], 1))

    def frame() -> int:
        return Measurement.get(shown, wide, table).maximum - sum(natural)

    def set_widths(widths: Sequence[int]) -> None:
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width

    set_widths(natural)  # the frame's is then known without measuring every cell again
    available = shown.width if shown.is_terminal else _UNBOUNDED
    if sum(widths) + frame() > available:
        table.box, table.show_edge, table.pad_edge, table.padding = SIMPLE_HEAD, False, False, (0, 1, 0, 0)
    if sum(widths) + frame() > available:
        widths = natural
    for _ in range(min(available - frame(), sum(natural)) - sum(widths)):
        widths[max(range(len(widths)), key=missing)] += 1
    total = sum(widths) + frame()
    set_widths(widths)
    return max(shown.width, total)
