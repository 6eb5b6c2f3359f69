"""Formats the figures of a plan, and its tables."""

from collections.abc import Iterator
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tridock.plan.correction import Correction
from tridock.plan.memory import GIB, StageMemory

STYLES: Final = {"fits": "green", "tight": "dark_orange3", "no-fit": "bold red", "illegal": "bold red"}
LABELS: Final = {"fits": "fits", "tight": "tight: over 80 %", "no-fit": "does not fit", "illegal": "cannot run"}


def headed_table(title: str) -> Table:
    """Returns an empty table with a title."""
    # At least as wide as its title, which would otherwise wrap.
    width = len(title)
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, min_width=width
    )


def interval(stage: StageMemory) -> str:
    """Formats a stage's memory as ``12.3 GiB``, or as ``11.2 to 12.3 GiB``."""
    low, high = f"{stage.least_bytes / GIB:.1f}", f"{stage.total_bytes / GIB:.1f}"
    return f"{high} GiB" if low == high else f"{low} to {high} GiB"


def gib(amount: int) -> str:
    """Formats bytes in GiB to three decimals; "-" for none."""
    return "-" if amount == 0 else f"{amount / GIB:.3f}" if abs(amount) >= GIB / 1000 else "<0.001"


def seconds(value: float) -> str:
    """Formats a time in s, or below a second in ms."""
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def duration(seconds: float) -> str:
    """Formats a time in days, hours, minutes, s or ms: in the largest unit that gives at least 1."""
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "s")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds * 1000:.0f} ms"


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
