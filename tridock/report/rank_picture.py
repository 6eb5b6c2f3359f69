"""Draws the rank map with matplotlib, after computing the positions on the sheet.

Lengths are in inches; the origin is the lower left corner. One axes fills the figure.
"""

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError
from tridock.layout.groups import make_groups
from tridock.plan import Plan, Rank
from tridock.report.drawing import new_figure
from tridock.report.rank_map import KEY, Line, by_node, headline, ink, legend, place, stage_colours

MARGIN, HEAD, ENTRY, SWATCH = 0.35, 0.8, 0.22, 0.14
"""The margin; the title with two lines; a line of the legend; its colour swatch."""
TITLE_PT, TEXT_PT = 14.0, 9.0
_ASPECT: Final = 1.4
"""Preferred width over height."""

Point = tuple[float, float]
Nodes = Mapping[str, Sequence[Rank]]
Measure = Callable[[str, float], float]
"""Returns the width of a text in a bold font of a size in points."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The size of a slot, and of its text in points (1/72 inch)."""

    width: float
    height: float
    points: float

    @property
    def line(self) -> float:
        return 1.35 * self.points / 72

    @property
    def gap(self) -> float:
        """Distance between nodes, and from the edge of a node to its slots."""
        return self.points / 72

    @property
    def inset(self) -> float:
        """Distance from the edge of a slot to its coloured area, for the outline of its tensor parallel group."""
        return 0.07 * self.height


SLOTS: Final = ((32, Slot(0.95, 0.7, 10.0)), (256, Slot(0.74, 0.54, 7.5)), (1 << 30, Slot(0.6, 0.42, 5.8)))
"""Sizes by the largest number of ranks."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """Positions of the nodes, and of the legend below them."""

    slot: Slot
    slots_across: int
    node_width: float
    node_height: float
    nodes_across: int
    nodes_width: float
    entry_width: float
    entries_across: int
    foot: float
    """Height of the legend."""
    width: float
    height: float

    def node(self, number: int) -> Point:
        row, column = divmod(number, self.nodes_across)
        gap, top = self.slot.gap, self.height - MARGIN - HEAD
        return MARGIN + column * (self.node_width + gap), top - row * (self.node_height + gap) - self.node_height

    def slot_of(self, node: int, number: int) -> Point:
        """Returns the lower left corner of a slot, by its index on the node."""
        (left, bottom), (row, column) = self.node(node), divmod(number, self.slots_across)
        top = bottom + self.node_height - 0.5 * self.slot.gap - self.slot.line
        return left + self.slot.gap + column * self.slot.width, top - (row + 1) * self.slot.height

    def entry(self, number: int) -> Point:
        """Returns the left end of a line of the legend, at half its height."""
        row, column = divmod(number, self.entries_across)
        return MARGIN + column * self.entry_width, MARGIN + self.foot - (row + 0.5) * ENTRY


def lay_out(plan: Plan, nodes: Nodes, least_width: float, entries: Sequence[str], measure: Measure) -> Sheet:
    """Returns a sheet at least ``least_width`` wide, with the nodes in the best shape."""
    slot = next(slot for ranks, slot in SLOTS if plan.world_size <= ranks)
    most = max(len(ranks) for ranks in nodes.values())
    slots_across = _slots_across(most, plan.tensor_model_parallel_size)
    names = max(measure(name, slot.points) for name in nodes)
    node_width = max(slots_across * slot.width, names) + 2 * slot.gap
    node_height = -(-most // slots_across) * slot.height + slot.line + 1.5 * slot.gap
    entry_width = max(measure(entry, TEXT_PT) for entry in entries) + 4 * SWATCH

    def sheet(nodes_across: int) -> Sheet:
        rows = -(-len(nodes) // nodes_across)
        nodes_width = nodes_across * (node_width + slot.gap) - slot.gap
        inner = max(nodes_width, entry_width, least_width)
        entries_across = min(int(inner / entry_width), len(entries))
        foot = -(-len(entries) // entries_across) * ENTRY
        return Sheet(
            slot=slot,
            slots_across=slots_across,
            node_width=node_width,
            node_height=node_height,
            nodes_across=nodes_across,
            nodes_width=nodes_width,
            entry_width=entry_width,
            entries_across=entries_across,
            foot=foot,
            width=inner + 2 * MARGIN,
            height=HEAD + rows * (node_height + slot.gap) + foot + 2.5 * MARGIN,
        )

    def ill_shaped(sheet: Sheet) -> float:
        ragged = 0.5 if len(nodes) % sheet.nodes_across else 0.0  # full rows are easier to read
        empty = math.log(sheet.width / (sheet.nodes_width + 2 * MARGIN))
        return abs(math.log(sheet.width / sheet.height / _ASPECT)) + ragged + empty

    return min((sheet(across) for across in range(1, len(nodes) + 1)), key=ill_shaped)


def _slots_across(most: int, tensor: int) -> int:
    """Returns the slots per row: up to four form one row, more about two. Tensor parallel groups fill whole rows if
    possible."""
    if most <= 4:
        return most
    half = -(-most // 2)
    return min(range(3, 9), key=lambda across: (bool(across % tensor and tensor % across), abs(across - half)))


def tensor_outlines(plan: Plan, sheet: Sheet, nodes: Nodes) -> Iterator[tuple[bool, list[Point]]]:
    """Yields outlines of the tensor parallel groups of several ranks, and whether a group crosses nodes.

    Where a group continues in the next row, its outline is open.
    """
    tensor, inset = plan.tensor_model_parallel_size, 0.4 * sheet.slot.inset
    for node, ranks in enumerate(nodes.values() if tensor > 1 else ()):
        begin = 0
        for _, group in itertools.groupby(ranks, lambda rank: rank.rank // tensor):
            end = begin + len(list(group))
            for first, last, open_right, open_left in _rows(begin, end, sheet.slots_across):
                left, top = sheet.slot_of(node, first)
                right, bottom = sheet.slot_of(node, last)
                left, top = left + inset, top + sheet.slot.height - inset
                right, bottom = right + sheet.slot.width - inset, bottom + inset
                for line in _around(left, bottom, right, top, open_left, open_right):
                    yield end - begin < tensor, line
            begin = end


def _rows(begin: int, end: int, across: int) -> Iterator[tuple[int, int, bool, bool]]:
    """Yields rectangles that cover the slots from ``begin`` to ``end``, exclusive.

    Each has its first (upper left) and last slot, and whether the group continues after it, and before it.
    """
    if begin % across == end % across == 0:
        yield begin, end - 1, False, False
        return
    for row in range(begin // across, (end - 1) // across + 1):
        first, last = max(begin, row * across), min(end, (row + 1) * across) - 1
        yield first, last, last < end - 1, first > begin


def _around(
    left: float, bottom: float, right: float, top: float, open_left: bool, open_right: bool
) -> Iterator[list[Point]]:
    if open_left and open_right:
        yield [(left, bottom), (right, bottom)]
        yield [(left, top), (right, top)]
    elif open_left:
        yield [(left, bottom), (right, bottom), (right, top), (left, top)]
    elif open_right:
        yield [(right, bottom), (left, bottom), (left, top), (right, top)]
    else:
        yield [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]


_DPI: Final = 150
_LARGEST: Final = 12_000
"""Pixels on the longer side of a PNG at most."""
_METADATA: Final[dict[str, dict[str, None]]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
"""Removes the version and date that matplotlib adds."""
_INK, _GREY, _PALE, _EDGE = "#111111", "#555555", "#f3f3f3", "#bbbbbb"
_DASHES: Final = (0, (2.5, 1.5))


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
    """Returns a figure of the nodes: slots coloured by pipeline stage, tensor parallel groups outlined."""
    nodes, lines = by_node(plan), legend(plan, captions)
    kinds = _outline_kinds(plan)
    subtitles = (headline(plan), KEY)
    least_width = max(_width(title, TITLE_PT), *(_width(line, TEXT_PT) for line in subtitles))
    sheet = lay_out(plan, nodes, least_width, [line.text for line in lines] + list(kinds.values()), _width)
    figure = new_figure((sheet.width, sheet.height), layout=None)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, sheet.width), ylim=(0, sheet.height))
    axes.set_axis_off()
    top = sheet.height - MARGIN
    _write(axes, MARGIN, top, title, fontsize=TITLE_PT, fontweight="bold", va="top")
    for number, line in enumerate(subtitles):
        _write(axes, MARGIN, top - HEAD * (0.42 + 0.25 * number), line, fontsize=TEXT_PT, color=_GREY, va="top")
    _draw_nodes(axes, sheet, nodes)
    _draw_slots(axes, plan, sheet, nodes)
    for cut in (False, True):
        found = [points for of_cut, points in tensor_outlines(plan, sheet, nodes) if of_cut == cut]
        _outline(axes, found, cut, 0.12 * sheet.slot.points)
    _draw_legend(axes, plan, sheet, lines, kinds)
    return figure


def _width(text: str, points: float) -> float:
    """Returns the width of a text in bold, in inches. An SVG viewer may use another, wider font."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    bold = FontProperties(family="DejaVu Sans", size=points, weight="bold")
    width: float = text_to_path.get_text_width_height_descent(text, bold, ismath=False)[0]
    return width / 72


def _outline_kinds(plan: Plan) -> dict[bool, str]:
    """Returns what outlines mean in this plan: whole tensor parallel groups (False), or parts of some (True)."""
    groups = make_groups(plan)
    cut, every = len(groups.crossing("tensor")), len(groups.members["tensor"])
    kinds = {False: "tensor parallel group", True: "part of one that crosses nodes"}
    there = {False: cut < every, True: cut > 0}
    return {kind: text for kind, text in kinds.items() if there[kind] and plan.tensor_model_parallel_size > 1}


def _draw_nodes(axes: Any, sheet: Sheet, nodes: Nodes) -> None:
    corners = [sheet.node(number) for number in range(len(nodes))]
    _fill(axes, corners, (sheet.node_width, sheet.node_height), _PALE, edgecolors=_EDGE, linewidths=0.7)
    points, gap = sheet.slot.points, sheet.slot.gap
    for (left, bottom), name in zip(corners, nodes, strict=True):
        top = bottom + sheet.node_height - 0.5 * gap
        _write(axes, left + gap, top, name, fontsize=points, fontweight="bold", va="top", color=_INK)


def _draw_slots(axes: Any, plan: Plan, sheet: Sheet, nodes: Nodes) -> None:
    colours, slot = stage_colours(plan.pipeline_model_parallel_size), sheet.slot
    placed = [
        (rank, sheet.slot_of(node, number))
        for node, ranks in enumerate(nodes.values())
        for number, rank in enumerate(ranks)
    ]
    corners = [(left + slot.inset, bottom + slot.inset) for _, (left, bottom) in placed]
    size = (slot.width - 2 * slot.inset, slot.height - 2 * slot.inset)
    _fill(axes, corners, size, [colours[rank.pipeline_parallel_rank] for rank, _ in placed])
    for rank, (left, bottom) in placed:
        lines = ((f"slot {rank.slot}", 0.75, "normal"), (f"r{rank.rank}", 1.0, "bold"), (place(rank), 0.8, "normal"))
        for number, (text, scale, weight) in enumerate(lines):
            middle = bottom + slot.height / 2 + (1 - number) * slot.line
            style = {"fontsize": slot.points * scale, "fontweight": weight}
            colour = ink(colours[rank.pipeline_parallel_rank])
            _write(axes, left + slot.width / 2, middle, text, ha="center", va="center_baseline", color=colour, **style)


def _draw_legend(axes: Any, plan: Plan, sheet: Sheet, lines: Sequence[Line], kinds: Mapping[bool, str]) -> None:
    colours, half = stage_colours(plan.pipeline_model_parallel_size), SWATCH / 2
    for number, line in enumerate(lines):
        left, middle = sheet.entry(number)
        corners = [(left, middle - half), (left + SWATCH, middle - half)]
        colour = [colours[line.first], colours[line.last]]
        _fill(axes, corners, (SWATCH, SWATCH), colour, edgecolors=colour, linewidths=0.3)  # no seam between them
    for number, cut in enumerate(kinds, start=len(lines)):
        left, middle = sheet.entry(number)
        low, high, right = middle - half, middle + half, left + 2 * SWATCH
        _outline(axes, [[(left, low), (right, low), (right, high), (left, high), (left, low)]], cut, 1.2)
    for number, text in enumerate([*(line.text for line in lines), *kinds.values()]):
        left, middle = sheet.entry(number)
        _write(axes, left + 2.6 * SWATCH, middle, text, fontsize=TEXT_PT, va="center_baseline")


def _write(axes: Any, left: float, height: float, text: str, **style: Any) -> None:
    axes.text(left, height, text, parse_math=False, **style)


def _fill(axes: Any, corners: Sequence[Point], size: Point, colours: Any, **style: Any) -> None:
    """Draws rectangles of one size, by their lower left corners: in one collection, which is much faster."""
    from matplotlib.collections import PolyCollection

    width, height = size
    boxes = [[(x, y), (x + width, y), (x + width, y + height), (x, y + height)] for x, y in corners]
    axes.add_collection(PolyCollection(boxes, facecolors=colours, **style), autolim=False)


def _outline(axes: Any, lines: Sequence[Sequence[Point]], cut: bool, width: float) -> None:
    from matplotlib.collections import LineCollection

    style = _DASHES if cut else "solid"
    axes.add_collection(LineCollection(lines, colors=_INK, linewidths=width, linestyles=[style]), autolim=False)
