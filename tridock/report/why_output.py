"""The output of `tridock plan --why`: a layout's terms, and their changes in other layouts."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tridock.errors import Problem, RequestError
from tridock.experiment import load_experiment
from tridock.layout import Slots
from tridock.plan.assumptions import Assumptions
from tridock.plan.memory import GIB
from tridock.plan.why import (
    JudgedLayout,
    Why,
    check_data_parallel,
    difference,
    judge_layout,
    neighbors,
    overrides_of_layout,
    with_batch_of,
)
from tridock.report.plan_output import sources, traffic_table
from tridock.report.plan_text import LABELS, STYLES, gib, headed_table, interval, seconds

_MOST_TERMS = 2
_LEAST_S = 0.0005
_SIDE_BY_SIDE = ("", "A", "B", "B - A")


def print_why(
    config: Path,
    overrides: Sequence[str],
    slots: Slots,
    assumptions: Assumptions,
    console: Console,
    named: Sequence[str],
    as_json: Callable[..., None] | None,
) -> int:
    """Explains the experiment's layout by its neighbors, or compares it with a ``named`` one, or compares two.

    ``as_json`` prints the fields of a JSON document, instead of text. Returns 2 if the explained layout cannot run or
    does not fit, else 0. Raises :class:`RequestError` if the experiment or a name is invalid.
    """
    experiment = load_experiment(config, overrides)
    if not named:
        why = neighbors(experiment, slots, assumptions)
    else:
        layouts = []
        for text in named:
            changes = overrides_of_layout(text)
            other = with_batch_of(experiment, slots, load_experiment(config, [*overrides, *changes]))
            layouts.append(judge_layout(other, slots, assumptions, changes))
            check_data_parallel(text, layouts[-1])
        if len(layouts) == 1:
            layouts.insert(0, judge_layout(with_batch_of(experiment, slots, experiment), slots, assumptions))
        why = Why(layouts[0], tuple(layouts[1:]))
    problems = why.layout.reasons
    if as_json is not None:
        as_json(**_document(why, problems, assumptions))
    else:
        tables = comparison(why.layout, why.others[0]) if named else explanation(why)
        console.print(tables, soft_wrap=not console.is_terminal)
        if problems:
            named_file = [replace(problem, where=f"{config}: {problem.where}") for problem in problems]
            print(RequestError(named_file), file=sys.stderr)
    return RequestError.exit_code if problems else 0


def _document(why: Why, problems: Sequence[Problem], assumptions: Assumptions) -> dict[str, Any]:
    correction = assumptions.correction
    return {
        "verdict": why.layout.verdict,
        "problems": [problem.document for problem in problems],
        "why": why.document(),
        **({} if correction is None else {"from_run": correction.document()}),
    }


def explanation(why: Why) -> Group:
    """Returns the layout's terms, largest first, and a row for each neighbor."""
    layout = why.layout
    parts: list[RenderableType] = [_head(layout), ""]
    if layout.time:
        parts += [_shares("Time of an iteration", layout.time, seconds, _LEAST_S), ""]
    if layout.worst is not None:
        title = f"Memory of a rank of stage {layout.worst.stage}, the fullest"
        parts += [_shares(title, layout.memory_terms, lambda value: f"{gib(round(value))} GiB", GIB / 1000)]
        parts += [sources(layout), ""]
    if layout.cost is not None and layout.cost.traffic:
        parts += [traffic_table(layout.cost), ""]
    return Group(*parts, _neighbors(why))


def _head(layout: JudgedLayout) -> Text:
    text = Text(f"{layout.label}: ").append(LABELS[layout.verdict], STYLES[layout.verdict])
    if layout.worst is not None:
        text.append(f" · {interval(layout.worst)} per rank")
    if layout.cost is not None and (found := layout.cost.estimate) is not None:
        text.append(f" · about {seconds(found.iteration, found.seconds_range)} per iteration")
    return text


def _shares(title: str, terms: Mapping[str, float], form: Any, least: float) -> Table:
    table, total = headed_table(title, ("", "amount", "share")), sum(terms.values())
    for name, value in sorted(terms.items(), key=lambda item: -item[1]):
        if abs(value) >= least:
            table.add_row(name, form(value), f"{value / total:.0%}")
    return table


def _neighbors(why: Why) -> Table:
    table = headed_table(f"One step from {why.layout.label}, best first")
    for name in ("change", "", "time", "GiB", "because"):
        table.add_column(name, justify="right" if name in ("time", "GiB") else "left", overflow="fold")
    before = why.layout
    for other in why.others:
        change = "\n".join(change.partition(".")[2] for change in other.changes)
        verdict = Text(LABELS[other.verdict], STYLES[other.verdict])
        if other.worst is None:
            table.add_row(change, verdict, "-", "-", "\n".join(f"{it.where} {it.what}" for it in other.problems[:2]))
            continue
        time, memory = _relative(before.seconds, other.seconds), f"{other.worst.total_bytes / GIB:.1f}"
        table.add_row(change, verdict, time, memory, "\n".join(_because(before, other)))
    return table


def _relative(before: float | None, after: float | None) -> str:
    return "-" if not before or after is None else f"{after / before - 1:+.1%}"


def _because(before: JudgedLayout, other: JudgedLayout) -> Iterator[str]:
    """Yields the largest changes of time and of memory."""
    time = [(name, value) for name, value in difference(before.time, other.time).items() if abs(value) >= _LEAST_S]
    if time:
        yield "time: " + ", ".join(f"{name} {_signed_seconds(value)}" for name, value in time[:_MOST_TERMS])
    memory = difference(before.memory_terms, other.memory_terms).items()
    if large := [(name, value) for name, value in memory if abs(value) >= GIB / 20]:
        yield "memory: " + ", ".join(f"{name} {_signed_gib(value)}" for name, value in large[:_MOST_TERMS])


def comparison(first: JudgedLayout, second: JudgedLayout) -> Group:
    """Returns the terms of two layouts side by side, the largest difference first."""
    parts: list[RenderableType] = [Text("A  ") + _head(first), Text("B  ") + _head(second), ""]
    for name, layout in (("A", first), ("B", second)):
        parts += [f"{name} cannot run: {problem}" for problem in layout.problems]
    if first.time and second.time:
        table = headed_table("Time of an iteration", _SIDE_BY_SIDE)
        for name, change in difference(first.time, second.time).items():
            if abs(change) >= _LEAST_S:
                amounts = (seconds(one.time.get(name, 0.0)) for one in (first, second))
                table.add_row(name, *amounts, _signed_seconds(change))
        total = sum(second.time.values()) - sum(first.time.values())
        _add_total(table, seconds(first.seconds or 0), seconds(second.seconds or 0), _signed_seconds(total))
        parts += [table, ""]
    if first.worst is not None and second.worst is not None:
        stages = f"stage {first.worst.stage} of A and {second.worst.stage} of B, the fullest"
        table = headed_table(f"Memory per rank in GiB, {stages}", _SIDE_BY_SIDE)
        for name, change in difference(first.memory_terms, second.memory_terms).items():
            if abs(change) >= GIB / 1000:
                table.add_row(
                    name, *(gib(one.memory_terms.get(name, 0)) for one in (first, second)), _signed_gib(change)
                )
        totals = first.worst.total_bytes, second.worst.total_bytes
        _add_total(table, gib(totals[0]), gib(totals[1]), _signed_gib(totals[1] - totals[0]))
        parts.append(table)
    return Group(*parts)


def _add_total(table: Table, *cells: str) -> None:
    table.add_section()
    table.add_row(*(Text(cell, "bold") for cell in ("total", *cells)))


def _signed_seconds(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def _signed_gib(value: float) -> str:
    return f"{value / GIB:+.3f}" if abs(value) < GIB else f"{value / GIB:+.1f}"
