"""Bars with the spread of their repeats, as PNG: benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_bars(
    path: Path,
    title: str,
    unit: str,
    names: Sequence[str],
    values: Sequence[float],
    ranges: Sequence[tuple[float, float]],
) -> None:
    """One bar a name; ``ranges`` are the least and the greatest of its repeats."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 1.2 + 0.38 * len(names)), layout="constrained")
    errors = [
        [value - low for value, (low, _) in zip(values, ranges, strict=True)],
        [high - value for value, (_, high) in zip(values, ranges, strict=True)],
    ]
    axes.barh(range(len(names)), values, xerr=errors, color="#4878a8", height=0.62, error_kw={"capsize": 3})
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
