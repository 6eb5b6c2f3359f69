"""Figures: lines over iterations, and bars. Each as SVG for the page and as a PNG file."""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tridock.report.columns import Curve
from tridock.report.markup import escape, one_line
from tridock.report.theme import BAD, GRID, INK, SOFT, themed

_SIZE: Final = (6.2, 3.3)
_DPI: Final = 150
_FEW_POINTS: Final = 40
"""A curve with at most this many points has a dot at each: a run of one iteration would otherwise be invisible."""
_LEGEND: Final = {"frameon": False, "fontsize": 8.5}
_LONGEST_NAME: Final = 64
_ENTRIES_WIDTH: Final = 82
"""Characters of the legend's font across a figure; matplotlib cuts a legend that is wider."""
_ENTRY_SIGNS: Final = 8
"""The width of a legend's entry beside its name, in characters."""
_MOST_ENTRIES: Final = 3
"""Entries of a legend beside each other."""
_MOST_MARKS: Final = 200
_MAGNITUDES: Final = 50.0
"""If the largest value is this many times the smallest, and all are positive, the axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve, its name in the legend (empty: not in the legend) and its style."""

    name: str
    curve: Curve
    colour: str
    style: str = "-"
    gaps: bool = False
    """Whether to mark values that are not finite."""
    wide: bool = False
    """Identical runs cover each other; a wide line stays visible on both sides of the others."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Vertical lines at iterations, or with ``below`` ticks on the axis."""

    name: str
    at: Sequence[float]
    colour: str
    below: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar per category; None where a category has none."""

    name: str
    values: Sequence[float | None]
    colour: str
    ranges: Sequence[tuple[float, float]] = ()
    """The least and the greatest value of each category, if its value is a median."""


def draw_lines(
    lines: Sequence[Line], unit: str, marks: Sequence[Mark] = (), *, linear: bool = False, over: str = "iteration"
) -> Any:
    """Returns a matplotlib figure of curves over integers, thinned to the resolution of a screen."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(_SIZE)
    axes = figure.add_subplot()
    handles: list[tuple[Any, str]] = []
    for line in lines:
        curve = line.curve.thinned()
        width = 3.4 if line.wide else 1.6
        dot = "o" if len(curve.without_gaps()) <= _FEW_POINTS else ""
        drawn = axes.plot(curve.x, curve.y, line.style, marker=dot, markersize=4, linewidth=width, color=line.colour)
        if line.name:
            handles.append((drawn[0], line.name))
        if line.gaps and (bad := curve.gaps()):
            crosses = axes.plot(bad, [0.98] * len(bad), "x", color=BAD, transform=axes.get_xaxis_transform())
            handles.append((crosses[0], f"{line.name}: not finite"))
    for mark in marks:
        at = mark.at[:: -(-len(mark.at) // _MOST_MARKS)]
        if mark.below:
            ticks = axes.plot(at, [0.02] * len(at), "|", color=mark.colour, ms=9, transform=axes.get_xaxis_transform())
            handles.append((ticks[0], mark.name))
        else:
            verticals = [axes.axvline(x, color=mark.colour, linestyle="--", linewidth=1.2) for x in at]
            handles += [(verticals[0], mark.name)] if verticals else []
    if not linear and _spans_magnitudes(lines):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_xlabel(over)
    _finish(axes, unit)
    if _entries_across(handles) < _MOST_ENTRIES:  # inside the axes, long names would cover the curves
        legend_below(figure, handles)
    elif len(handles) > 1:
        _name(axes.legend(*_numbered(handles), **_LEGEND), handles)
    return figure


def draw_bars(categories: Sequence[str], bars: Sequence[Bars], unit: str, limits: Sequence[Line] = ()) -> Any:
    """Returns a matplotlib figure of horizontal bars, the first category on top.

    Each of ``limits`` is a vertical line at its first y.
    """
    height = max(1.6, 0.9 + 0.24 * len(categories) * max(1, len(bars)) ** 0.7)
    figure = new_figure((_SIZE[0], height))
    axes = figure.add_subplot()
    handles: list[tuple[Any, str]] = []
    thick = 0.8 / max(1, len(bars))
    for number, bar in enumerate(bars):
        present = [(place, value) for place, value in enumerate(bar.values) if value is not None]
        centres = [place - 0.4 + thick * (number + 0.5) for place, _ in present]
        values = [value for _, value in present]
        drawn = axes.barh(centres, values, height=0.9 * thick, color=bar.colour)
        if bar.ranges:
            errors = [[value - bar.ranges[place][0] for place, value in present],
                      [bar.ranges[place][1] - value for place, value in present]]  # fmt: skip
            axes.errorbar(values, centres, xerr=errors, fmt="none", color=INK, capsize=3)
        handles.append((drawn, bar.name))
    for limit in limits:
        handles.append((axes.axvline(limit.curve.y[0], color=limit.colour, linestyle=limit.style), limit.name))
    labels = axes.set_yticks(range(len(categories)), [one_line(name, 40) for name in categories])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    assert len(labels) == len(categories)
    axes.set_ylim(len(categories) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    _finish(axes, "", grid="x")
    legend_below(figure, handles)
    return figure


def as_png(figure: Any) -> bytes:
    """Returns the figure as PNG, on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def as_svg(figure: Any, label: str, *, coloured: bool = False) -> str:
    """Returns the figure as SVG for an HTML page: in the page's colours, or with ``coloured`` in its own."""
    import matplotlib as mpl

    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.hashsalt": "tridock", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=not coloured, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    # A page contains several figures, whose groups would have the same ids.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    if not coloured:
        return themed(svg)
    # Not larger than it was drawn.
    return svg.replace("<svg ", f'<svg style="max-width:{figure.get_size_inches()[0]:.2f}in" ', 1)


def new_figure(size: tuple[float, float], layout: Any = "constrained") -> Any:
    """Returns an empty figure with a canvas of its own: without pyplot, a display or global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _finish(axes: Any, unit: str, grid: str = "both") -> None:
    axes.set_ylabel(unit, color=SOFT)
    axes.xaxis.label.set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(color=GRID, linewidth=0.7, axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)


def _numbered(handles: Sequence[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    """Returns numbers instead of names, because matplotlib hides a name that begins with "_"."""
    return [handle for handle, _ in handles], [str(number) for number in range(len(handles))]


def _entries_across(handles: Sequence[tuple[Any, str]]) -> int:
    longest = max((len(one_line(name, _LONGEST_NAME)) for _, name in handles), default=0)
    return min(_MOST_ENTRIES, max(1, _ENTRIES_WIDTH // (longest + _ENTRY_SIGNS)))


def legend_below(figure: Any, handles: Sequence[tuple[Any, str]]) -> None:
    """Adds a legend of several entries below the axes, which keep their height."""
    if len(handles) > 1:
        across = _entries_across(handles)
        figure.set_figheight(figure.get_figheight() + 0.18 * ((len(handles) - 1) // across))
        _name(figure.legend(*_numbered(handles), loc="outside lower center", ncols=across, **_LEGEND), handles)


def _name(legend: Any, handles: Sequence[tuple[Any, str]]) -> None:
    for text, (_, name) in zip(legend.get_texts(), handles, strict=True):
        text.set_parse_math(False)
        text.set_text(one_line(name, _LONGEST_NAME))
        text.set_color(INK)


def _spans_magnitudes(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.curve.thinned().y if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _MAGNITUDES
