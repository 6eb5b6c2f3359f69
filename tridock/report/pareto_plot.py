"""Memory against time of a search's layouts, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tridock.plan.memory import GIB
from tridock.plan.search import Candidate, Search
from tridock.report.drawing import new_figure
from tridock.report.rank_picture import write_picture
from tridock.report.theme import GRID, INK, SOFT

_FIT, _TIGHT, _FRONT = "#4878a8", "#d08030", "#c04830"


def plot_pareto_front(found: Search, name: str, path: Path) -> None:
    """Draws every layout that was found to a PNG or SVG file, and a line through the Pareto front.

    Raises :class:`RequestError` for another suffix.
    """
    write_picture(path, "memory against time", lambda: draw(found, name))


def draw(found: Search, name: str) -> Any:
    """Returns a matplotlib figure of the layouts, with a line through the Pareto front."""
    figure = new_figure((8.0, 5.0))
    axes = figure.add_subplot()
    for fit, colour in (("fits", _FIT), ("tight", _TIGHT)):
        if points := [one for one in found.found if one.worst.fit == fit]:
            axes.scatter(*_places(points), s=12, color=colour, alpha=0.6, linewidths=0, label=fit)
    label = "no other is faster with less; numbers as listed"
    front = found.pareto_front
    axes.plot(*_places(front), color=_FRONT, marker="o", markersize=5, linewidth=1.4, drawstyle="steps-post",
              label=label)  # fmt: skip
    numbers = {id(one): number for number, one in enumerate(found.found, start=1)}
    for place, one in enumerate(front):
        # Above and below in turn: neighbors may be as good as one.
        where = {"xytext": (0, -13 if place % 2 else 6), "textcoords": "offset points", "ha": "center"}
        spot = one.seconds, one.worst.total_bytes / GIB
        axes.annotate(str(numbers[id(one)]), spot, fontsize=8, color=INK, **where)
    axes.margins(y=0.1)
    axes.tick_params(which="both", length=4, pad=3)  # as long and as far for 1 as for 0.9
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("seconds of an iteration", color=SOFT)
    axes.set_ylabel("GiB per rank, at most", color=SOFT)
    axes.set_title(f"Layouts of {name}", loc="left", parse_math=False)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    return figure


def _places(layouts: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [one.seconds for one in layouts], [one.worst.total_bytes / GIB for one in layouts]
