"""Pictures of a plan with matplotlib: the rank map, and memory against time of a search's layouts."""

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError
from tridock.plan import Plan, Rank
from tridock.plan.memory import GIB
from tridock.plan.search import Candidate, Search
from tridock.report.drawing import legend_below, new_figure
from tridock.report.rank_map import KEY, by_node, headline, ink, legend, place, stage_colours
from tridock.report.theme import GRID, INK, SOFT

_DPI: Final = 150
_LARGEST: Final = 12_000
"""Pixels on the longer side of a PNG at most."""
_METADATA: Final[dict[str, dict[str, None]]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
"""Removes the version and date that matplotlib adds."""
_SLOTS: Final = ((32, 0.95, 0.7, 10.0), (256, 0.74, 0.54, 7.5), (1 << 30, 0.6, 0.42, 5.8))
"""Width and height of a slot in inches, and the size of its text in points, by the largest number of ranks."""
_LEAST_WIDTH: Final = 5.6
_HEAD: Final = 0.9
_ASPECT: Final = 1.4
"""The least width of the figure and the height of its title in inches; the preferred width over height."""


def plot(plan: Plan, path: Path, title: str, captions: Mapping[int, str] | None = None) -> None:
    """Draws the rank map to ``path``, as PNG or SVG by its suffix. The same arguments give the same bytes.

    Raises :class:`RequestError` for any other suffix. ``captions`` are texts for the legend by stage.
    """
    write_picture(path, "the rank map", lambda: draw(plan, title, captions or {}))


def write_picture(path: Path, what: str, figure_of: Callable[[], Any]) -> None:
    """Writes a figure to ``path``, as PNG or SVG by its suffix. The same figure gives the same bytes.

    Raises :class:`RequestError` for any other suffix.
    """
    picture = path.suffix.lower().removeprefix(".")
    if picture not in _METADATA:
        todo = "end the file's name in .png or .svg"
        raise RequestError(Problem(str(path), f"{what} is drawn as PNG or SVG", path.suffix or "no suffix", todo))

    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "tridock", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figure = figure_of()
        resolution = min(_DPI, _LARGEST / max(figure.get_size_inches()))
        figure.savefig(buffer, format=picture, dpi=resolution, metadata=_METADATA[picture])
    run_folder.write_atomic(path, buffer.getvalue())


def draw(plan: Plan, title: str, captions: Mapping[int, str]) -> Any:
    """Returns a figure of the nodes: a row of slots each, coloured by stage, tensor parallel groups outlined."""
    from matplotlib.patches import Patch, Rectangle

    nodes, colours = by_node(plan), stage_colours(plan.pipeline_model_parallel_size)
    width, height, points = next(size for most, *size in _SLOTS if plan.world_size <= most)
    most = max(len(ranks) for ranks in nodes.values())
    names = max(len(node) for node in nodes) * 0.65 * points / 72 / width
    wide, tall = max(most, names) + 0.4, 1.6  # of a node, in slots

    def ill_shaped(across: int) -> float:
        return abs(math.log(across * wide * width / (-(-len(nodes) // across) * tall * height + _HEAD) / _ASPECT))

    across = min(range(1, len(nodes) + 1), key=ill_shaped)
    rows = -(-len(nodes) // across)
    size = (max(across * wide * width, _LEAST_WIDTH), rows * tall * height + _HEAD)
    figure = new_figure(size)
    axes = figure.add_subplot()
    axes.set(xlim=(0, size[0] / width), ylim=(rows * tall, 0))
    axes.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", parse_math=False)
    axes.set_title(f"{headline(plan)}\n{KEY}", loc="left", fontsize=9, color=SOFT, parse_math=False)
    outlines = {}
    for number, (node, ranks) in enumerate(nodes.items()):
        left, top = number % across * wide, number // across * tall
        axes.text(left, top + 0.4, node, fontsize=points, fontweight="bold", parse_math=False)
        for slot, rank in enumerate(ranks):
            colour = colours[rank.pipeline_parallel_rank]
            axes.add_patch(Rectangle((left + slot + 0.06, top + 0.56), 0.88, 0.88, facecolor=colour))
            text = f"slot {rank.slot}\nr{rank.rank}\n{place(rank)}"
            style = {"fontsize": 0.85 * points, "ha": "center", "va": "center", "color": ink(colour)}
            axes.text(left + slot + 0.5, top + 1.0, text, **style)
        for first, count, whole in _tensor_groups(plan, ranks):
            what = "tensor parallel group" if whole else "part of one that crosses nodes"
            outline: dict[str, Any] = {
                "fill": False,
                "edgecolor": INK,
                "linewidth": 0.12 * points,
                "linestyle": "-" if whole else "--",
            }
            outlines[what] = Rectangle((left + first + 0.02, top + 0.52), count - 0.04, 0.96, **outline)
            axes.add_patch(outlines[what])
    stages = [(Patch(facecolor=colours[line.first], edgecolor=colours[line.last], linewidth=2), line.text)
              for line in legend(plan, captions)]  # fmt: skip
    legend_below(figure, [*stages, *((outline, what) for what, outline in outlines.items())])
    return figure


def _tensor_groups(plan: Plan, ranks: Sequence[Rank]) -> Iterator[tuple[int, int, bool]]:
    """Yields the tensor parallel groups of a node: the first slot, the number of slots, whether it is all of it."""
    tensor, first = plan.tensor_model_parallel_size, 0
    for _, group in itertools.groupby(ranks if tensor > 1 else (), lambda rank: rank.rank // tensor):
        count = len(list(group))
        yield first, count, count == tensor
        first += count


_FIT, _TIGHT, _FRONT = "#4878a8", "#d08030", "#c04830"


def plot_pareto_front(found: Search, name: str, path: Path) -> None:
    """Draws every layout that was found to a PNG or SVG file, and a line through the Pareto front.

    Raises :class:`RequestError` for another suffix.
    """
    write_picture(path, "memory against time", lambda: draw_pareto_front(found, name))


def draw_pareto_front(found: Search, name: str) -> Any:
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
    for order, one in enumerate(front):
        # Above and below in turn: neighbors may be as good as one.
        where = {"xytext": (0, -13 if order % 2 else 6), "textcoords": "offset points", "ha": "center"}
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
