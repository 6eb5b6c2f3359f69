"""Which charts a report has: of every quantity that at least one of its runs has logged."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tridock.report.columns import Curve
from tridock.report.figures import Bars, Line, Mark, as_png, as_svg, draw_bars, draw_lines
from tridock.report.plan_facts import gpu_limit, planned_memory_by_rank
from tridock.report.subject import Subject
from tridock.report.text import one_line
from tridock.report.theme import BAD, SERIES, SOFT, series_colour

_MOST_PHASES: Final = 20
_MOST_BARS: Final = 64


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure, drawn: ``svg`` for the page, ``png`` for a file of its own."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A column that is drawn over the iterations; ``unit`` is the axis's, ``short`` the caption's."""

    column: str
    name: str
    title: str
    unit: str
    short: str = ""
    settled: bool = True
    """Whether the caption gives its median; the last value of what is set, not measured."""


_QUANTITIES: Final = (
    _Quantity("lr", "learning-rate", "Learning rate", "learning rate", settled=False),
    _Quantity("grad_norm", "gradient-norm", "Gradient norm", "global norm"),
    _Quantity("tokens_per_second", "throughput", "Throughput", "tokens/s", " tokens/s"),
    _Quantity("samples_per_second", "throughput-samples", "Throughput in samples", "samples/s", " samples/s"),
    _Quantity("tflops", "tflops", "Throughput of a GPU, by the log", "TFLOP/s", " TFLOP/s"),
    _Quantity("step_time_s", "step-time", "Time of a step", "seconds", " s"),
)


def charts(subjects: Sequence[Subject]) -> Iterator[Chart]:
    """The charts in the page's order. None of them is empty."""
    yield from _loss(subjects)
    for quantity in _QUANTITIES:
        # Samples are for those that do not know their tokens.
        shown = [it for it in subjects if quantity.column != "samples_per_second" or not _has(it, "tokens_per_second")]
        yield from _over_iterations(shown, subjects, quantity)
    yield from _loss_scale(subjects)
    yield from _phases(subjects)
    yield from _occasions(subjects)
    for number, subject in enumerate(subjects):
        yield from _memory(subject, number, several=len(subjects) > 1)


def _has(subject: Subject, column: str) -> bool:
    return bool(subject.columns.curve(column).finite)


def _chart(name: str, title: str, caption: str, figure: Any) -> Chart:
    return Chart(name, title, caption, as_svg(figure, title), as_png(figure))


def _loss(subjects: Sequence[Subject]) -> Iterator[Chart]:
    lines: list[Line] = []
    several = len(subjects) > 1
    for number, subject in enumerate(subjects):
        colour = series_colour(number)
        train = subject.columns.curve("loss")
        if len(train):
            lines.append(
                Line(subject.name if several else "training", train, colour, gaps=True, wide=several and number == 0)
            )
        for split, curve in subject.evaluations.items():
            if curve.finite:
                other = colour if several else SERIES[1 if split == "valid" else 2]
                kind = {"valid": "validation"}.get(split, split)
                lines.append(Line("" if several else kind, curve, other, "--" if split == "valid" else ":"))
    if not lines:
        return
    marks = _marks(subjects[0]) if len(subjects) == 1 else ()
    thinned = any(len(line.curve) > len(line.curve.thinned()) for line in lines)
    more = " Of each stretch of iterations the lowest and the highest value are drawn." if thinned else ""
    kinds = " Dashed: validation; dotted: test." if several and any(not line.name for line in lines) else ""
    caption = f"Cross-entropy in nats for each token.{kinds}{more}"
    yield _chart("loss", "Loss", caption, draw_lines(lines, "loss", marks))


def _marks(subject: Subject) -> list[Mark]:
    found = []
    for event, name, below in (
        ("checkpoint_saved", "checkpoint", True),
        ("checkpoint_loaded", "went on from a checkpoint", False),
    ):
        at = [it["iteration"] for it in subject.events if it.get("event") == event and _is_number(it.get("iteration"))]
        if at:
            found.append(Mark(name, at, SOFT if below else SERIES[3], below))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _over_iterations(shown: Sequence[Subject], subjects: Sequence[Subject], quantity: _Quantity) -> Iterator[Chart]:
    lines: list[Line] = []
    for number, subject in enumerate(subjects):
        if any(subject is it for it in shown) and _has(subject, quantity.column):
            curve = subject.columns.curve(quantity.column).without_gaps()
            wide = len(subjects) > 1 and not lines
            lines.append(Line(subject.name, curve, series_colour(number), wide=wide))
    if lines:
        figure = draw_lines(lines, quantity.unit, linear=not quantity.settled)
        yield _chart(quantity.name, quantity.title, _caption(lines, quantity, len(subjects)), figure)


def _caption(lines: Sequence[Line], quantity: _Quantity, subjects: int) -> str:
    def value(line: Line) -> str:
        found = statistics.median(line.curve.y) if quantity.settled else line.curve.y[-1]
        return f"{found:,.4g}{quantity.short}"

    word = "Median" if quantity.settled else "Last"
    if subjects == 1:
        return f"{word}: {value(lines[0])}."
    return f"{word}: " + "; ".join(f"{one_line(line.name)} {value(line)}" for line in lines[:8]) + "."


def _loss_scale(subjects: Sequence[Subject]) -> Iterator[Chart]:
    """Only where it moves: it stands still in all but fp16."""
    quantity = _Quantity("loss_scale", "loss-scale", "Loss scale", "loss scale", settled=False)
    moving = [it for it in subjects if len(set(it.columns.curve("loss_scale").finite)) > 1]
    yield from _over_iterations(moving, subjects, quantity)


def _phases(subjects: Sequence[Subject]) -> Iterator[Chart]:
    medians = {number: _phase_medians(subject) for number, subject in enumerate(subjects)}
    totals: dict[str, float] = {}
    for found in medians.values():
        for name, time in found.items():
            totals[name] = max(totals.get(name, 0.0), time)
    names = sorted(totals, key=totals.__getitem__, reverse=True)[:_MOST_PHASES]
    if not names:
        return
    bars = [
        Bars(subjects[number].name, [_in_ms(found.get(name)) for name in names], series_colour(number))
        for number, found in medians.items()
        if found
    ]
    left_out = f" The {len(totals) - len(names)} shortest are left out." if len(totals) > len(names) else ""
    yield _chart("phases", "Time of a step by phase", _phase_words(subjects) + left_out, draw_bars(names, bars, "ms"))


def _phase_words(subjects: Sequence[Subject]) -> str:
    found = [it for it in subjects if it.phases.names()]
    own, timers = [it for it in found if it.phases_add_up], [it for it in found if not it.phases_add_up]
    words = []
    if own:
        words.append("Median of the first rank's steps; the phases of a step add up to it.")
    if timers:
        words.append("Median time of an iteration by Megatron's timers. Some contain others: their sum is more than a")
        words.append("step's time.")
    return " ".join(words)


def _phase_medians(subject: Subject) -> dict[str, float]:
    values = {name: subject.phases.curve(name).finite for name in subject.phases.names()}
    if subject.phases_add_up:  # the first step of a run pays for its start
        values = {name.replace("_", " "): found[1:] or found for name, found in values.items()}
    medians = {name: statistics.median(found) for name, found in values.items() if found}
    # Of timers that were never started there is nothing to see.
    return medians if any(medians.values()) else {}


def _occasions(subjects: Sequence[Subject]) -> Iterator[Chart]:
    """Evaluations and checkpoints: beside them the phases of a step would hardly be seen."""
    names = sorted({name for subject in subjects for name in subject.occasions})
    if not names:
        return
    bars = [
        Bars(
            it.name, [statistics.median(it.occasions[name]) if name in it.occasions else None for name in names], colour
        )
        for it, colour in ((subject, series_colour(number)) for number, subject in enumerate(subjects))
        if it.occasions
    ]
    caption = "The median of each; the time of a step does not contain them."
    yield _chart("between-steps", "Between steps", caption, draw_bars(names, bars, "seconds"))


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _memory(subject: Subject, number: int, *, several: bool) -> Iterator[Chart]:
    """By rank: what the plan predicts, what was measured, and the device's limit."""
    planned, measured = planned_memory_by_rank(subject), subject.memory
    if not planned and not measured:
        return
    ranks = sorted(planned.keys() | measured.keys())
    limit, peak = gpu_limit(subject), None if measured else subject.peak_memory
    known = [*planned.values(), *measured.values(), *(size for size in (limit, peak) if size is not None)]
    unit, scale = ("GiB", 2**30) if max(known) >= 2**30 / 2 else ("MiB", 2**20)
    kinds = [
        (name, {rank: held / scale for rank, held in found.items()}, colour)
        for name, found, colour in (("planned", planned, SERIES[7]), ("measured", measured, series_colour(number)))
        if found
    ]
    limits = []
    if peak is not None:
        limits.append(_limit("measured, the fullest rank", peak / scale, series_colour(number), "--"))
    if limit is not None:
        limits.append(_limit("the GPU's memory", limit / scale, BAD, ":"))
    title = "Memory of a rank" + (f": {one_line(subject.name)}" if several else "")
    figure = _by_rank(ranks, kinds, unit, limits)
    yield _chart("memory" + (f"-{number + 1}" if several else ""), title, "The most that a rank holds.", figure)


def _by_rank(
    ranks: Sequence[int], kinds: Sequence[tuple[str, Mapping[int, float], str]], unit: str, limits: Sequence[Line]
) -> Any:
    """Bars, or of more ranks than bars have room for curves over them."""
    if len(ranks) <= _MOST_BARS:
        bars = [Bars(name, [found.get(rank) for rank in ranks], colour) for name, found, colour in kinds]
        return draw_bars([f"rank {rank}" for rank in ranks], bars, unit, limits)
    lines = [
        Line(name, Curve(array("d", sorted(found)), array("d", (found[rank] for rank in sorted(found)))), colour)
        for name, found, colour in kinds
    ]
    ends = array("d", (ranks[0], ranks[-1]))
    lines += [Line(it.name, Curve(ends, array("d", it.curve.y[:1] * 2)), it.colour, it.style) for it in limits]
    return draw_lines(lines, unit, linear=True, over="rank")


def _limit(name: str, value: float, colour: str, style: str) -> Line:
    return Line(name, Curve(array("d", [0.0]), array("d", [value])), colour, style)
