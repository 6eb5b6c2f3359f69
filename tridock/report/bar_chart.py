"""Bars, as PNG: benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOM: Final = 0.1
"""What a figure needs, as a share of the longest bar."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its name; ``least`` and ``greatest`` of what it is the median of, where it is one of several."""

    name: str
    value: float
    least: float | None = None
    greatest: float | None = None
    expected: float | None = None
    """What it was to be; drawn as a line across the bar."""

    @property
    def spread(self) -> tuple[float, float]:
        """How far it reaches below the value and above it."""
        least = self.value if self.least is None else self.least
        greatest = self.value if self.greatest is None else self.greatest
        return self.value - least, greatest - self.value


def _figure(value: float) -> str:
    return f"{value:,.3g}" if value < 1000.0 else f"{value:,.0f}"


def draw_bars(path: Path, title: str, unit: str, bars: Sequence[Bar], expected: str = "expected") -> None:
    """One below the other, from zero, each with its figure where there is room; ``expected`` names the lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 1.2 + 0.38 * len(bars)), layout="constrained")
    places = range(len(bars))
    drawn = axes.barh(places, [bar.value for bar in bars], color="#4878a8", height=0.62)
    ranged = [(place, bar) for place, bar in zip(places, bars, strict=True) if any(bar.spread)]
    if ranged:
        errors = list(zip(*(bar.spread for _, bar in ranged), strict=True))
        values = [bar.value for _, bar in ranged]
        axes.errorbar(values, [place for place, _ in ranged], xerr=errors, fmt="none", color="black", capsize=3)
    lines = [(place, bar.expected) for place, bar in zip(places, bars, strict=True) if bar.expected is not None]
    if lines:
        low, high = [place - 0.38 for place, _ in lines], [place + 0.38 for place, _ in lines]
        axes.vlines([value for _, value in lines], low, high, color="#c04830", linewidth=2.0, label=expected)
        figure.legend(loc="outside upper right", frameon=False)
    room = _ROOM * max(bar.value for bar in bars)
    # In the bar, where no spread is in the way.
    labels = [_figure(bar.value) if bar.value > room else "" for bar in bars]
    axes.bar_label(drawn, labels, label_type="center", color="white", fontsize=8)
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
