"""The rank map drawn: one matplotlib axes that fills the figure, with inches for units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tridock.layout.groups import make_groups
from tridock.plan import Plan
from tridock.report.rank_sheet import (
    HEAD,
    MARGIN,
    SWATCH,
    TEXT_PT,
    TITLE_PT,
    Nodes,
    Point,
    Sheet,
    lay_out,
    tensor_outlines,
)
from tridock.report.stages import KEY, Line, by_node, headline, ink, legend, place, stage_colours

_INK, _GREY, _PALE, _EDGE = "#111111", "#555555", "#f3f3f3", "#bbbbbb"
_DASHES: Final = (0, (2.5, 1.5))


def draw(plan: Plan, title: str, captions: Mapping[int, str]) -> Any:
    """A matplotlib figure: nodes with their slots, coloured by pipeline stage, tensor parallel groups outlined."""
    # The figure's own canvas: no pyplot, no display, nothing global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    nodes, lines = by_node(plan), legend(plan, captions)
    kinds = _outline_kinds(plan)
    subtitles = (headline(plan), KEY)
    least_width = max(_width(title, TITLE_PT), *(_width(line, TEXT_PT) for line in subtitles))
    sheet = lay_out(plan, nodes, least_width, [line.text for line in lines] + list(kinds.values()), _width)
    figure = Figure(figsize=(sheet.width, sheet.height))
    FigureCanvasAgg(figure)
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
    """Inches that a text takes in bold; a reader of SVG may show it in another font, a little wider."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    bold = FontProperties(family="DejaVu Sans", size=points, weight="bold")
    width: float = text_to_path.get_text_width_height_descent(text, bold, ismath=False)[0]
    return width / 72


def _outline_kinds(plan: Plan) -> dict[bool, str]:
    """What this plan's outlines mean: whole tensor parallel groups (False), or parts of some (True)."""
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
        _fill(axes, corners, (SWATCH, SWATCH), [colours[line.first], colours[line.last]])
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
    """Rectangles of one size, by their lower left corners: in one collection, which is drawn much faster."""
    from matplotlib.collections import PolyCollection

    width, height = size
    boxes = [[(x, y), (x + width, y), (x + width, y + height), (x, y + height)] for x, y in corners]
    axes.add_collection(PolyCollection(boxes, facecolors=colours, **style), autolim=False)


def _outline(axes: Any, lines: Sequence[Sequence[Point]], cut: bool, width: float) -> None:
    from matplotlib.collections import LineCollection

    style = _DASHES if cut else "solid"
    axes.add_collection(LineCollection(lines, colors=_INK, linewidths=width, linestyles=[style]), autolim=False)
