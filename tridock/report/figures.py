"""Drawing: lines over iterations, bars. Each figure as SVG for the page and as PNG beside it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tridock.report.columns import Curve
from tridock.report.text import one_line
from tridock.report.theme import BAD, GRID, INK, SOFT, themed

_SIZE: Final = (6.2, 3.3)
_DPI: Final = 150
_FEW: Final = 40
"""Up to so many points each has its mark: a run of one is a point."""
_LEGEND: Final = {"frameon": False, "fontsize": 8.5}
_MOST_MARKS: Final = 200
_MAGNITUDES: Final = 50.0
"""A range as wide as that, of positive numbers, is shown on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve, its name in the legend (empty: it stands in none) and its looks."""

    name: str
    curve: Curve
    colour: str
    style: str = "-"
    gaps: bool = False
    """Whether values that are not finite are marked."""
    wide: bool = False
    """Runs that are the same lie on top of each other: one that is wide shows on both sides of the others."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at an iteration, or (``below``) a small one on the axis."""

    name: str
    at: Sequence[float]
    colour: str
    below: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar for each category; None for none there."""

    name: str
    values: Sequence[float | None]
    colour: str


def draw_lines(
    lines: Sequence[Line], unit: str, marks: Sequence[Mark] = (), *, linear: bool = False, over: str = "iteration"
) -> Any:
    """A matplotlib figure of curves over iterations, or over other whole numbers, thinned to what a screen shows."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _canvas(_SIZE)
    handles: list[tuple[Any, str]] = []
    for line in lines:
        curve = line.curve.thinned()
        width = 3.4 if line.wide else 1.6
        dot = "o" if len(curve.without_gaps()) <= _FEW else ""
        drawn = axes.plot(curve.x, curve.y, line.style, marker=dot, markersize=4, linewidth=width, color=line.colour)
        if line.name:
            handles.append((drawn[0], line.name))
        if line.gaps and (bad := curve.gaps()):
            crosses = axes.plot(bad, [0.98] * len(bad), "x", color=BAD, transform=axes.get_xaxis_transform())
            handles.append((crosses[0], f"{line.name}: not finite"))
    for mark in marks:
        at = mark.at[:: -(-len(mark.at) // _MOST_MARKS)]
        if mark.below:
            shown = axes.plot(at, [0.02] * len(at), "|", color=mark.colour, ms=9, transform=axes.get_xaxis_transform())
            handles.append((shown[0], mark.name))
        else:
            verticals = [axes.axvline(x, color=mark.colour, linestyle="--", linewidth=1.2) for x in at]
            handles += [(verticals[0], mark.name)] if verticals else []
    if not linear and _spans_magnitudes(lines):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_xlabel(over)
    _finish(axes, unit)
    _legend(axes, handles)
    return figure


def draw_bars(categories: Sequence[str], bars: Sequence[Bars], unit: str, limits: Sequence[Line] = ()) -> Any:
    """A matplotlib figure of horizontal bars, the first category on top; a limit is a vertical line at its first y."""
    height = max(1.6, 0.9 + 0.24 * len(categories) * max(1, len(bars)) ** 0.7)
    figure, axes = _canvas((_SIZE[0], height))
    handles: list[tuple[Any, str]] = []
    thick = 0.8 / max(1, len(bars))
    for number, bar in enumerate(bars):
        there = [(place, value) for place, value in enumerate(bar.values) if value is not None]
        middles = [place - 0.4 + thick * (number + 0.5) for place, _ in there]
        drawn = axes.barh(middles, [value for _, value in there], height=0.9 * thick, color=bar.colour)
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
    if handles[1:]:
        _name(figure.legend(*_numbered(handles), loc="outside lower center", ncols=3, **_LEGEND), handles)
    return figure


def as_png(figure: Any) -> bytes:
    """On white, whatever the page's colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def as_svg(figure: Any, label: str, *, coloured: bool = False) -> str:
    """To stand in an HTML page; in the reader's colours, but for one that brings its own (``coloured``)."""
    import matplotlib as mpl

    from tridock.report.markup import escape

    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.hashsalt": "tridock", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=not coloured, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    # Several stand in one page: their groups would have the same names.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    if not coloured:
        return themed(svg)
    # A drawing of its own size, which is not to be blown up.
    return svg.replace("<svg ", f'<svg style="max-width:{figure.get_size_inches()[0]:.2f}in" ', 1)


def _canvas(size: tuple[float, float]) -> tuple[Any, Any]:
    # The figure's own canvas: no pyplot, no display, nothing global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _finish(axes: Any, unit: str, grid: str = "both") -> None:
    axes.set_ylabel(unit, color=SOFT)
    axes.xaxis.label.set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(color=GRID, linewidth=0.7, axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)


def _legend(axes: Any, handles: Sequence[tuple[Any, str]]) -> None:
    if len(handles) > 1:
        _name(axes.legend(*_numbered(handles), **_LEGEND), handles)


def _numbered(handles: Sequence[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    """Numbers for names: matplotlib takes a name that begins with "_" for "do not show"."""
    return [handle for handle, _ in handles], [str(number) for number in range(len(handles))]


def _name(legend: Any, handles: Sequence[tuple[Any, str]]) -> None:
    for text, (_, name) in zip(legend.get_texts(), handles, strict=True):
        text.set_parse_math(False)
        text.set_text(one_line(name, 48))
        text.set_color(INK)


def _spans_magnitudes(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.curve.thinned().y if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _MAGNITUDES
