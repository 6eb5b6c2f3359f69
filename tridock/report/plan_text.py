"""Formats the figures of a plan, and its tables."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tridock.plan import Assessment
from tridock.plan.correction import Correction
from tridock.plan.memory import GIB, StageMemory

STYLES: Final = {"fits": "green", "tight": "dark_orange3", "no-fit": "bold red", "illegal": "bold red"}
LABELS: Final = {"fits": "fits", "tight": "tight: over 80 %", "no-fit": "does not fit", "illegal": "cannot run"}


def headed_table(title: str, columns: Sequence[str] = (), left: Sequence[str] = ("",)) -> Table:
    """Returns an empty table with a title; the columns that are not in ``left`` have numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    table.min_width = len(title)  # a title that is wider would wrap
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def interval(stage: StageMemory) -> str:
    """Formats a stage's memory as ``12.3 GiB``, or as ``11.2 to 12.3 GiB``."""
    low, high = f"{stage.least_bytes / GIB:.1f}", f"{stage.most_bytes / GIB:.1f}"
    return f"{high} GiB" if low == high else f"{low} to {high} GiB"


def gib(amount: int) -> str:
    """Formats bytes in GiB to three decimals; "-" for none."""
    return "-" if amount == 0 else f"{amount / GIB:.3f}" if abs(amount) >= GIB / 1000 else "<0.001"


def seconds(value: float, between: tuple[float, float] | None = None) -> str:
    """Formats a time in s, or below a second in ms, with the range around it: ``463 ms, 380 to 560``."""
    unit, of, places = ("ms", 1000, 1 if value < 0.01 else 0) if value < 1 else ("s", 1, 1 if value >= 10 else 2)
    around = "" if between is None else ", " + " to ".join(f"{end * of:,.{places}f}" for end in between)
    return f"{value * of:,.{places}f} {unit}{around}"


def duration(seconds: float) -> str:
    """Formats a time in days, hours, minutes, s or ms: in the largest unit that gives at least 1."""
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "s")):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds * 1000:.0f} ms"


def duration_range(between: tuple[float, float] | None) -> str:
    return "" if between is None else f" ({duration(between[0])} to {duration(between[1])})"


def flops(value: float) -> str:
    """Formats floating point operations with their largest unit."""
    for size, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if value >= size:
            return f"{value / size:,.2f} {name}"
    return f"{value / 1e9:,.2f} GFLOP"


def count_short(value: float) -> str:
    """Formats a count with its largest unit: ``1.5 T``, ``300.0 B``, ``2.1 M``, ``4.0 k``."""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.1f} {name}"
    return f"{value:,.0f}"


def correction_rows(correction: Correction) -> Iterator[tuple[str, str, str, str]]:
    """Yields for each figure of a run its name, the planned and measured values, and the factor for other plans."""
    planned = "unknown" if correction.planned_s is None else seconds(correction.planned_s)
    times = "kernels and messages" if correction.links else "kernels"
    rate = f"{1 / correction.time:,.3g} TFLOP/s" if correction.planned_s is None else f"{correction.time:.3g}, {times}"
    yield "median step", planned, seconds(correction.measured_s), rate
    if correction.measured_bytes is not None:
        amounts = [f"{amount / GIB:.2f} GiB" for amount in (correction.planned_bytes, correction.measured_bytes)]
        yield "tensors, fullest rank", amounts[0], amounts[1], f"{correction.memory:.3g}"


_LEAST_HOURS = 0.1


def days_line(assessment: Assessment) -> str | None:
    """Returns the time and GPU hours to train on the tokens asked for; None if they or the step time are unknown."""
    cost = assessment.cost
    if cost is None or (days := cost.days(assessment.tokens)) is None:
        return None
    counted = f"{count_short(assessment.tokens)} {assessment.experiment.model.unit}"
    around = "" if cost.estimate is None else duration_range(cost.estimate.times_of(days * 86400))
    return f"{counted} take about {duration(days * 86400)}{around}{_hours(assessment)}"


def _hours(assessment: Assessment) -> str:
    """Returns GPU hours and their cost; empty below a tenth of an hour."""
    hours, price, each = assessment.gpu_hours, assessment.price, assessment.assumptions.cost_per_gpu_hour
    if hours is None or (hours < _LEAST_HOURS and price is None):
        return ""
    cost = "" if price is None else f", which cost {price:,.2f} at {each:g} each"
    energy = assessment.energy_kwh
    used = "" if energy is None else f", at most {energy:,.{0 if energy >= 10 else 1}f} kWh of the GPUs"
    return f": {hours:,.1f} GPU hours{cost}{used}"


def goodput_line(assessment: Assessment) -> str | None:
    """Returns the goodput with the experiment's and the best ``save_interval``; None if it was not asked for."""
    found, size = assessment.goodput, assessment.checkpoint_bytes
    if found is None or size is None:
        return None
    failing = f"a failure every {duration(found.mtbf_hours * 3600)}"
    writing, pause = duration(found.writing), duration(found.pause)
    saving = f"{size / 1e9:,.1f} GB of a checkpoint take {writing}, and stop training for {pause}"
    intervals = {"train.save_interval": found.own, "the best interval": found.best}
    shown = (
        f"{interval.goodput:.1%} with {name} {interval.iterations:,} ({duration(interval.seconds)})"
        for name, interval in intervals.items()
        if interval is not None
    )
    return f"goodput {', '.join(shown)}: {failing}; {saving}"
