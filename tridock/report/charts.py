"""The charts of a report, one for each quantity that at least one run has logged, and the loss curve of one run."""

import io
import itertools
import shlex
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.events import Event
from tridock.contracts.records import Record, check_run, read_metrics
from tridock.errors import Problem, RequestError
from tridock.experiment import is_command, load_command, load_experiment
from tridock.report.columns import Curve
from tridock.report.drawing import Bars, Line, Mark, as_png, as_svg, draw_bars, draw_lines, new_figure
from tridock.report.markup import one_line
from tridock.report.subject import Subject, gpu_limit, planned_memory_by_rank
from tridock.report.summary import summarize
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
)


def charts(subjects: Sequence[Subject]) -> Iterator[Chart]:
    """Yields the charts in the order of the page. None of them is empty."""
    yield from _loss(subjects)
    for quantity in _QUANTITIES:
        # Samples are drawn only for subjects without tokens.
        drawn = [it for it in subjects if quantity.column != "samples_per_second" or not _has(it, "tokens_per_second")]
        yield from _over_iterations(drawn, subjects, quantity)
    yield from _loss_scale(subjects)
    yield from _phases(subjects)
    yield from _occasions(subjects)
    for number, subject in enumerate(subjects):
        yield from _memory(subject, number, several=len(subjects) > 1)


def _has(subject: Subject, column: str) -> bool:
    return bool(subject.columns.curve(column).finite)


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
        at = [it["iteration"] for it in subject.events if it.get("event") == event and _is_number(it.get("iteration"))]
        if at:
            found.append(Mark(name, at, SOFT if below else SERIES[3], below))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _over_iterations(drawn: Sequence[Subject], subjects: Sequence[Subject], quantity: _Quantity) -> Iterator[Chart]:
    lines: list[Line] = []
    for number, subject in enumerate(subjects):
        if any(subject is it for it in drawn) and _has(subject, quantity.column):
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


def _loss_scale(subjects: Sequence[Subject]) -> Iterator[Chart]:
    """Yields the chart of the loss scale if it changes, as in fp16."""
    quantity = _Quantity("loss_scale", "loss-scale", "Loss scale", "loss scale", measured=False)
    changing = [it for it in subjects if len(set(it.columns.curve("loss_scale").finite)) > 1]
    yield from _over_iterations(changing, subjects, quantity)


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
    omitted = f" The {len(totals) - len(names)} shortest are not shown." if len(totals) > len(names) else ""
    yield Chart("phases", "Step time by phase", _phase_caption(subjects) + omitted, draw_bars(names, bars, "ms"))


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
    bars = [
        Bars(
            it.name, [statistics.median(it.occasions[name]) if name in it.occasions else None for name in names], colour
        )
        for it, colour in ((subject, series_colour(number)) for number, subject in enumerate(subjects))
        if it.occasions
    ]
    caption = "Median time for which training paused, not part of the step time."
    yield Chart("between-steps", "Between steps", caption, draw_bars(names, bars, "seconds"))


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


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


_TRAIN, _VALID, _TEST = "#1f5fa8", "#d9662b", "#2e8b57"
_MANY = 150
"""From this many logged iterations on, the curve is a running mean."""


def _points(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Returns the iterations that have a loss, with their losses."""
    return [(record["iteration"], record["loss"]) for record in records if record.get("loss") is not None]


def plot_loss(folder: Path, png: Path) -> None:
    """Draws the training, validation and test loss of a run to the file ``png``.

    Raises :class:`RequestError` if the folder is not a run folder, or has no logged iteration yet.
    """
    check_run(folder)
    iterations, evaluations = read_metrics(folder)
    points = _points(iterations)
    if not points:
        where = str(folder / run_folder.METRICS)
        todo = "wait for the first logged iteration, or see the run's logs"
        raise RequestError(Problem(where, "has no loss", "no logged iteration", todo))

    from matplotlib.ticker import MaxNLocator

    figure = new_figure((8, 4.8))
    axes = figure.add_subplot()
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    if len(points) >= _MANY:
        axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
        axes.plot(steps, running_mean(losses, len(losses) // 30), color=_TRAIN, linewidth=2, label="training (mean)")
    else:
        axes.plot(steps, losses, color=_TRAIN, linewidth=2, label="training")
    if valid := _points(evaluations.get("valid", [])):
        axes.plot(*zip(*valid, strict=True), "o-", color=_VALID, label="validation")
    if test := _points(evaluations.get("test", [])):
        axes.plot(*test[-1], "D", color=_TEST, label="test")
    name, subtitle, unit = _titles(folder)
    axes.set_title(
        f"{name}: loss {losses[0]:.2f} to {losses[-1]:.2f}",
        loc="left",
        fontsize=14,
        fontweight="bold",
        pad=24,
    )
    axes.text(0.0, 1.025, subtitle, transform=axes.transAxes, fontsize=9, color="#555555")
    axes.set_xlabel("iteration")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    run_folder.write_atomic(png, buffer.getvalue())


def _titles(folder: Path) -> tuple[str, str, str]:
    """Returns a run's name, a line with its model and number of ranks, and the label of its loss."""
    path = folder / run_folder.EXPERIMENT
    if is_command(path):
        command = load_command(path)
        return command.name, shlex.join(command.command)[:100], "loss, as the program prints it"
    summary = summarize(folder)
    ranks = f"{summary.ranks} ranks" if summary.ranks else ""
    subtitle = ", ".join(part for part in (summary.model, summary.layout, ranks) if part)
    return load_experiment(path).name, subtitle, "cross-entropy (nats per token)"


def running_mean(values: list[float], width: int) -> list[float]:
    """Returns the mean of the ``width`` values around each value (an odd number; fewer at both ends)."""
    reach = width // 2
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        means.append((sums[place + near + 1] - sums[place - near]) / (2 * near + 1))
    return means
