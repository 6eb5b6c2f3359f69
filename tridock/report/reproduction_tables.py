"""What a reproduction has found, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from tridock.differences import Difference
from tridock.report.text import printable
from tridock.reproduction import Outcome, Point


def environment_table(found: Sequence[Difference]) -> Table:
    """What differs from the original run, field by field."""
    table = Table("field", "then", "now", title="environment", title_justify="left")
    for difference in found:
        table.add_row(*(escape(printable(text, 200)) for text in (difference.field, *difference.values)))
    if not found:
        table.add_row("the same in every field", "", "")
    return table


def verdict_table(outcome: Outcome) -> Table:
    """The verdict, and how it came about."""
    table = Table(title=f"{escape(outcome.now)} beside {escape(outcome.then)}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(outcome):
        table.add_row(name, escape(text))
    return table


def _rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    losses = outcome.losses
    yield "verdict", outcome.verdict
    yield "devices", " and ".join(device or "unknown" for device in outcome.devices)
    yield "tolerance", "none: every bit counts" if not outcome.tolerance else f"{outcome.tolerance:g} x max(1, loss)"
    yield "environment", f"{len(outcome.environment)} fields differ" if outcome.environment else "the same"
    yield "losses compared", f"{losses.compared:,}"
    yield "losses that differ", f"{losses.differing:,}"
    if losses.first is not None:
        yield "first of them", _point(losses.first)
    if losses.largest_at is not None:
        yield "largest difference", f"{losses.largest:.3g} at iteration {losses.largest_at}"
    if losses.more:
        yield "only in the new run", f"{losses.more:,} losses: the original ended earlier"
    if outcome.moved:
        yield "note", "the original went on elsewhere on its way: its first losses are of another layout"


def _point(point: Point) -> str:
    now = "not logged" if not point.there else _loss(point.now)
    return f"iteration {point.iteration}, {point.split}: {_loss(point.then)} then, {now} now"


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else repr(loss)
