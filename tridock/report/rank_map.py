"""The rank map: each rank with its slot and node, as labels and colours, and as text for a terminal."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from tridock.errors import count
from tridock.plan import Plan, Rank

KEY: Final = "r5: rank 5. Below it pp.dp.cp.tp: pipeline, data, context, tensor parallel rank"
"""Explains the text in a slot."""

_APART: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Colours that colour-blind people can tell apart (Okabe and Ito, 2008), without black."""
_RAMP: Final = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
"""For more stages matplotlib's viridis, dark to light, shows their order."""

_MOST_STAGES: Final = 16
"""Up to this many stages have a line each in the legend."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the legend: stages ``first`` to ``last`` and their text."""

    first: int
    last: int
    text: str


def legend(plan: Plan, captions: Mapping[int, str]) -> list[Line]:
    """Returns stages with their ranks and captions; of many stages, neighbours with the same caption share a line."""
    ranks: dict[int, list[int]] = {}
    for rank in plan.ranks:
        ranks.setdefault(rank.pipeline_parallel_rank, []).append(rank.rank)
    lines = []
    few = len(ranks) <= _MOST_STAGES
    for _, alike in itertools.groupby(sorted(ranks), lambda stage: stage if few else captions.get(stage)):
        first, *others = alike
        last = others[-1] if others else first
        numbers = _span_of_ranks([rank for stage in (first, *others) for rank in ranks[stage]])
        caption = f": {captions[first]}" if first in captions else ""
        lines.append(Line(first, last, f"{span(first, last)} ({numbers}){caption}"))
    return lines


def _span_of_ranks(ranks: list[int]) -> str:
    """Returns ``r4``, ``r4 to r7``, or ``16 ranks from r0 on`` if other stages' ranks lie between."""
    begin, end = min(ranks), max(ranks)
    if end - begin + 1 > len(ranks):
        return f"{len(ranks)} ranks from r{begin} on"
    return f"r{begin}" if begin == end else f"r{begin} to r{end}"


def span(first: int, last: int) -> str:
    """Returns ``stage 4`` or ``stages 4 to 14``."""
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def stage_colours(stages: int) -> list[str]:
    """Returns a colour per stage, as ``#rrggbb``."""
    if stages <= len(_APART):
        return list(_APART[:stages])
    return [_between(stage * (len(_RAMP) - 1) / (stages - 1)) for stage in range(stages)]


def ink(colour: str) -> str:
    """Returns black or white, whichever is easier to read on a colour by its relative luminance (WCAG 2.1)."""
    shares = [part / 255 for part in _parts(colour)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.18 else "#ffffff"


def place(rank: Rank) -> str:
    """Returns the pipeline, data, context and tensor parallel rank: ``1.0.0.3``."""
    return ".".join(
        str(number)
        for number in (
            rank.pipeline_parallel_rank,
            rank.data_parallel_rank,
            rank.context_parallel_rank,
            rank.tensor_parallel_rank,
        )
    )


def by_node(plan: Plan) -> dict[str, list[Rank]]:
    """Returns the ranks of each node, in the order of the plan."""
    nodes: dict[str, list[Rank]] = {}
    for rank in plan.ranks:
        nodes.setdefault(rank.node, []).append(rank)
    return nodes


def headline(plan: Plan) -> str:
    """Returns the layout and its size: ``TP2 PP2 DP1: 4 ranks on 2 nodes``."""
    nodes = len(by_node(plan))
    return f"{plan.layout}: {count(plan.world_size, 'rank')} on {count(nodes, 'node')}"


def _between(position: float) -> str:
    left = min(int(position), len(_RAMP) - 2)
    share = position - left
    mixed = (
        round(one + (other - one) * share)
        for one, other in zip(_parts(_RAMP[left]), _parts(_RAMP[left + 1]), strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _parts(colour: str) -> Iterator[int]:
    return (int(colour[start : start + 2], 16) for start in (1, 3, 5))


_MANY: Final = 16
"""With more nodes, consecutive nodes that are alike are shown once."""
_KINDS: Final = 8
_FIRST: Final = 4
"""With more than ``_KINDS`` kinds of nodes, the first four and the last are shown."""


def render(plan: Plan, captions: Mapping[int, str] | None = None) -> RenderableType:
    """Returns the rank map for a terminal, readable without colour.

    ``captions`` are texts for the legend by stage (``12.3 GiB, tight``).
    """
    return _RankMap(plan, captions or {})


@dataclass(frozen=True, slots=True)
class _Box:
    """A node, and those after it that differ only in the numbers of their ranks and replicas."""

    node: str
    ranks: Sequence[Rank]
    alike: list[str] = field(default_factory=list)

    @property
    def note(self) -> str:
        return f"and {len(self.alike)} alike, to {self.alike[-1]}" if self.alike else ""


@dataclass(frozen=True, slots=True)
class _RankMap:
    plan: Plan
    captions: Mapping[int, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield Text(headline(self.plan), style="bold")
        boxes = _boxes(self.plan)
        if len(by_node(self.plan)) <= _MANY or len(boxes) <= _KINDS:
            yield self._nodes(boxes, boxes, width)
        else:
            yield self._nodes(boxes[:_FIRST], boxes, width)
            yield Text(_omitted(boxes[_FIRST:-1]))
            yield self._nodes(boxes[-1:], boxes, width)
        yield Text(KEY)
        yield Columns(list(self._legend()), padding=(0, 2))

    def _nodes(self, some: Sequence[_Box], boxes: Sequence[_Box], width: int) -> RenderableType:
        """Returns boxes side by side, in the size that fits the largest of ``boxes``."""
        cell = max(len(line) for rank in self.plan.ranks for line in _lines(rank))
        slots = max(len(box.ranks) for box in boxes)
        columns = _columns(slots, max(1, (width - 3) // (cell + 1)))
        names = max(len(text) + 6 for box in boxes for text in (box.node, box.note))
        each = min(width, max(columns * (cell + 1) + 3, names))
        return Columns([self._node(box, columns, cell, each) for box in some], padding=(0, 1))

    def _node(self, box: _Box, columns: int, cell: int, width: int) -> RenderableType:
        colours = stage_colours(self.plan.pipeline_model_parallel_size)
        lines = []
        for start in range(0, len(box.ranks), columns):
            row = box.ranks[start : start + columns]
            for number in range(len(_lines(row[0]))):
                line = Text(no_wrap=True, overflow="crop")
                for rank in row:
                    colour = colours[rank.pipeline_parallel_rank]
                    style = Style(color=ink(colour), bgcolor=colour) if number else Style(dim=True)
                    line.append(_lines(rank)[number].ljust(cell), style).append(" ")
                line.right_crop(1)
                lines.append(line)
        return Panel(
            Group(*lines),
            title=Text(box.node),
            title_align="left",
            subtitle=Text(box.note) if box.note else None,
            subtitle_align="left",
            width=width,
        )

    def _legend(self) -> Iterator[Text]:
        colours = stage_colours(self.plan.pipeline_model_parallel_size)
        lines = legend(self.plan, self.captions)
        spans = any(line.first != line.last for line in lines)
        for line in lines:
            swatch = Text()
            for stage in (line.first, line.last) if spans else (line.first,):
                swatch.append("  ", Style(bgcolor=colours[stage]))
            yield swatch.append(f" {line.text}")


def _lines(rank: Rank) -> tuple[str, str, str]:
    return f"slot {rank.slot}", f"r{rank.rank}", place(rank)


def _columns(slots: int, fitting: int) -> int:
    """Returns the slots per line if ``fitting`` fit: all, or equally many on each line."""
    lines = -(-slots // fitting)
    return -(-slots // lines)


def _boxes(plan: Plan) -> list[_Box]:
    """Returns the nodes; of many, only those that differ from the node before in more than their numbers."""
    nodes = by_node(plan)
    if len(nodes) <= _MANY:
        return [_Box(node, ranks) for node, ranks in nodes.items()]
    boxes: list[_Box] = []
    for _, alike in itertools.groupby(nodes.items(), key=lambda item: _pattern(item[1])):
        (node, ranks), *others = alike
        boxes.append(_Box(node, ranks, [name for name, _ in others]))
    return boxes


def _pattern(ranks: Sequence[Rank]) -> Hashable:
    first = ranks[0].data_parallel_rank
    return tuple(
        (
            rank.slot,
            rank.pipeline_parallel_rank,
            rank.data_parallel_rank - first,
            rank.context_parallel_rank,
            rank.tensor_parallel_rank,
        )
        for rank in ranks
    )


def _omitted(boxes: Sequence[_Box]) -> str:
    nodes = [node for box in boxes for node in (box.node, *box.alike)]
    first, last = boxes[0].ranks[0], boxes[-1].ranks[-1]
    stages = span(first.pipeline_parallel_rank, last.pipeline_parallel_rank)
    return f"... {len(nodes)} more nodes, {nodes[0]} to {nodes[-1]}: {stages} ..."
