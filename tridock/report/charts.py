"""The charts of a report, one for each quantity that at least one run has logged, and the loss curve of one run."""

import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.events import Event
from tridock.errors import Problem, RequestError
from tridock.report.columns import Curve
from tridock.report.drawing import Bars, Line, Mark, as_png, as_svg, draw_bars, draw_lines
from tridock.report.markup import one_line
from tridock.report.subject import Subject, gpu_limit, planned_memory_by_rank
from tridock.report.theme import BAD, SERIES, SOFT, series_colour

_MOST_PHASES: Final = 20
_MOST_BARS: Final = 64


@dataclass(frozen=True)
class Chart:
    """A figure as ``svg`` for the page and as ``png`` for a file; each is drawn on first use."""

    name: str
    title: str
    caption: str
    figure: Any

    @cached_property
    def svg(self) -> str:
        return as_svg(self.figure, self.title)

    @cached_property
    def png(self) -> bytes:
        return as_png(self.figure)


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A column to draw over iterations. ``unit`` labels the axis, ``short`` follows figures in the caption."""

    column: str
    name: str
    title: str
    unit: str
    short: str = ""
    measured: bool = True
    """Whether the caption has the median, as for measurements, or the last value."""


_QUANTITIES: Final = (
    _Quantity("lr", "learning-rate", "Learning rate", "learning rate", measured=False),
    _Quantity("grad_norm", "gradient-norm", "Gradient norm", "global norm"),
    _Quantity("tokens_per_second", "throughput", "Throughput", "tokens/s", " tokens/s"),
    _Quantity("samples_per_second", "throughput-samples", "Throughput in samples", "samples/s", " samples/s"),
    _Quantity("tflops", "tflops", "Throughput per GPU, as logged", "TFLOP/s", " TFLOP/s"),
    _Quantity("step_time_s", "step-time", "Step time", "seconds", " s"),
    _Quantity("loss_scale", "loss-scale", "Loss scale", "loss scale", measured=False),
    _Quantity("skipped_steps", "skipped-steps", "Skipped steps", "steps between two lines", measured=False),
)


def charts(subjects: Sequence[Subject]) -> Iterator[Chart]:
    """Yields the charts in the order of the page. None of them is empty."""
    yield from _loss(subjects)
    for quantity in _QUANTITIES:
        yield from _over_iterations(subjects, quantity)
    yield from _phases(subjects)
    yield from _occasions(subjects)
    for number, subject in enumerate(subjects):
        yield from _memory(subject, number, several=len(subjects) > 1)


def _is_drawn(subject: Subject, column: str) -> bool:
    """Whether a column has values: samples only of a subject without tokens, the loss scale and
    skipped steps if they change (fp16)."""
    values = subject.columns.curve(column).finite
    if column == "samples_per_second" and _is_drawn(subject, "tokens_per_second"):
        return False
    return len({*values}) > (column in ("loss_scale", "skipped_steps"))


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
    more = " Of each interval the curve shows the lowest and the highest value." if thinned else ""
    kinds = " Dashed: validation; dotted: test." if several and any(not line.name for line in lines) else ""
    caption = f"Cross-entropy in nats per token.{kinds}{more}"
    yield Chart("loss", "Loss", caption, draw_lines(lines, "loss", marks))


def _marks(subject: Subject) -> list[Mark]:
    found = []
    for event, name, below in (
        (Event.CHECKPOINT_SAVED, "checkpoint", True),
        (Event.CHECKPOINT_LOADED, "resumed from a checkpoint", False),
    ):
        at = [it["iteration"] for it in subject.events if it.get("event") == event and it.get("iteration") is not None]
        if at:
            found.append(Mark(name, at, SOFT if below else SERIES[3], below))
    return found


def _over_iterations(subjects: Sequence[Subject], quantity: _Quantity) -> Iterator[Chart]:
    lines: list[Line] = []
    for number, subject in enumerate(subjects):
        if _is_drawn(subject, quantity.column):
            curve = subject.columns.curve(quantity.column).without_gaps()
            wide = len(subjects) > 1 and not lines
            lines.append(Line(subject.name, curve, series_colour(number), wide=wide))
    if lines:
        figure = draw_lines(lines, quantity.unit, linear=not quantity.measured)
        yield Chart(quantity.name, quantity.title, _caption(lines, quantity, len(subjects)), figure)


def _caption(lines: Sequence[Line], quantity: _Quantity, subjects: int) -> str:
    def value(line: Line) -> str:
        found = statistics.median(line.curve.y) if quantity.measured else line.curve.y[-1]
        return f"{found:,.4g}{quantity.short}"

    word = "Median" if quantity.measured else "Last"
    if subjects == 1:
        return f"{word}: {value(lines[0])}."
    return f"{word}: " + "; ".join(f"{one_line(line.name)} {value(line)}" for line in lines[:8]) + "."


def _phases(subjects: Sequence[Subject]) -> Iterator[Chart]:
    medians = [{name: 1000 * time for name, time in _phase_medians(subject).items()} for subject in subjects]
    known = dict.fromkeys(name for found in medians for name in found)
    longest = sorted(known, key=lambda name: max(found.get(name, 0.0) for found in medians), reverse=True)
    names = longest[:_MOST_PHASES]
    if names:
        omitted = f" The {len(longest) - len(names)} shortest are not shown." if longest[_MOST_PHASES:] else ""
        figure = draw_bars(names, _bars(subjects, medians, names), "ms")
        yield Chart("phases", "Step time by phase", _phase_caption(subjects) + omitted, figure)


def _bars(subjects: Sequence[Subject], found: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[Bars]:
    """Returns the bars of the subjects that have values, which ``found`` has by name for each subject."""
    each = enumerate(zip(subjects, found, strict=True))
    return [
        Bars(it.name, [own.get(name) for name in names], series_colour(number)) for number, (it, own) in each if own
    ]


def _phase_caption(subjects: Sequence[Subject]) -> str:
    found = [it for it in subjects if it.phases.names()]
    own, timers = [it for it in found if it.phases_add_up], [it for it in found if not it.phases_add_up]
    sentences = []
    if own:
        sentences.append("Median over the steps of rank 0. The phases of a step add up to its time.")
    if timers:
        sentences.append("Median of Megatron's timers. Some contain others: their sum exceeds the step time.")
    return " ".join(sentences)


def _phase_medians(subject: Subject) -> dict[str, float]:
    values = {name: subject.phases.curve(name).finite for name in subject.phases.names()}
    if subject.phases_add_up:  # the first step includes the start of the run
        values = {name.replace("_", " "): found[1:] or found for name, found in values.items()}
    medians = {name: statistics.median(found) for name, found in values.items() if found}
    # Timers that never ran are all zero.
    return medians if any(medians.values()) else {}


def _occasions(subjects: Sequence[Subject]) -> Iterator[Chart]:
    """Yields the chart of evaluations and checkpoints, apart from the phases of a step, which are much shorter."""
    names = sorted({name for subject in subjects for name in subject.occasions})
    if not names:
        return
    medians = [{name: statistics.median(times) for name, times in it.occasions.items()} for it in subjects]
    caption = "Median time for which training paused, not part of the step time."
    figure = draw_bars(names, _bars(subjects, medians, names), "seconds")
    yield Chart("between-steps", "Between steps", caption, figure)


def _memory(subject: Subject, number: int, *, several: bool) -> Iterator[Chart]:
    """Yields the chart of memory per rank: planned, measured, and the limit of the device."""
    planned, measured = planned_memory_by_rank(subject), subject.memory
    if not planned and not measured:
        return
    ranks = sorted(planned.keys() | measured.keys())
    limit, peak = gpu_limit(subject), None if measured else subject.peak_memory
    known = [*planned.values(), *measured.values(), *(size for size in (limit, peak) if size is not None)]
    unit, scale = ("GiB", 2**30) if max(known) >= 2**30 / 2 else ("MiB", 2**20)
    kinds = [
        (name, {rank: size / scale for rank, size in found.items()}, colour)
        for name, found, colour in (("planned", planned, SERIES[7]), ("measured", measured, series_colour(number)))
        if found
    ]
    limits = []
    if peak is not None:
        limits.append(_limit("measured, highest rank", peak / scale, series_colour(number), "--"))
    if limit is not None:
        limits.append(_limit("GPU memory", limit / scale, BAD, ":"))
    title = "Memory per rank" + (f": {one_line(subject.name)}" if several else "")
    figure = _by_rank(ranks, kinds, unit, limits)
    yield Chart("memory" + (f"-{number + 1}" if several else ""), title, "Peak memory of each rank.", figure)


def _by_rank(
    ranks: Sequence[int], kinds: Sequence[tuple[str, Mapping[int, float], str]], unit: str, limits: Sequence[Line]
) -> Any:
    """Returns bars, or for many ranks curves over the rank number."""
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


def plot_loss(subject: Subject, png: Path) -> None:
    """Draws the page's chart of a run's losses to the file ``png``. Raises :class:`RequestError` without a loss."""
    for chart in _loss([subject]):
        chart.figure.suptitle(one_line(subject.name), fontsize=11, parse_math=False)
        run_folder.write_atomic(png, chart.png)
        return
    where = str(Path(subject.source) / run_folder.METRICS)
    todo = "wait for the first logged iteration, or see the run's logs"
    raise RequestError(Problem(where, "has no loss", "no logged iteration", todo))
