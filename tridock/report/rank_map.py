"""The rank map: each rank with its slot and node, as labels and colours, and as text for a terminal."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
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
"""Up to this many stages have a line each in a picture's legend."""
_SHORT: Final = 4
"""A terminal's legend has at most so many lines."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the legend: stages ``first`` to ``last`` and their text."""

    first: int
    last: int
    text: str


def legend(plan: Plan, captions: Mapping[int, str], *, is_short: bool = False) -> list[Line]:
    """Returns stages with their ranks and captions; of many stages, neighbours with the same caption share a line.

    A short legend has four lines at most: the stages between the first and the last ones share one.
    """
    ranks: dict[int, list[int]] = {}
    for rank in plan.ranks:
        ranks.setdefault(rank.pipeline_parallel_rank, []).append(rank.rank)
    few = len(ranks) <= (_SHORT if is_short else _MOST_STAGES)
    alike = itertools.groupby(sorted(ranks), lambda stage: stage if few else captions.get(stage))
    groups = [list(group) for _, group in alike]
    if is_short and len(groups) > _SHORT:
        groups[2:-1] = [[stage for group in groups[2:-1] for stage in group]]
    lines = []
    for group in groups:
        numbers = _span_of_ranks([rank for stage in group for rank in ranks[stage]])
        texts = {captions.get(stage, "") for stage in group} - {""}
        caption = f": {texts.pop()}" if len(texts) == 1 else ""
        lines.append(Line(group[0], group[-1], f"{span(group[0], group[-1])} ({numbers}){caption}"))
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
    inner = f"{rank.context_parallel_rank}.{rank.tensor_parallel_rank}"
    return f"{rank.pipeline_parallel_rank}.{rank.data_parallel_rank}.{inner}"


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


@dataclass(frozen=True, slots=True)
class RankMap:
    """The rank map for a terminal, readable without colour."""

    plan: Plan
    captions: Mapping[int, str] = field(default_factory=dict)
    """Texts for the legend by stage (``12.3 GiB, tight``)."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(headline(self.plan), style="bold")
        yield from self._nodes(options.max_width)
        yield Text(KEY)
        yield Columns(list(self._legend()), padding=(0, 2))

    def _nodes(self, width: int) -> Iterator[RenderableType]:
        """Yields nodes side by side; of more than two lines the first, and how many more there are."""
        nodes = list(by_node(self.plan).items())
        cell = max(len(line) for rank in self.plan.ranks for line in _lines(rank))
        columns = _columns(max(len(ranks) for _, ranks in nodes), max(1, (width - 3) // (cell + 1)))
        each = min(width, max(columns * (cell + 1) + 3, *(len(node) + 6 for node, _ in nodes)))
        fitting = max(1, (width + 1) // (each + 1))
        some = nodes if len(nodes) <= 2 * fitting else nodes[:fitting]
        yield Columns([self._node(node, ranks, columns, cell, each) for node, ranks in some], padding=(0, 1))
        if rest := nodes[len(some) :]:
            yield Text(f"… and {count(len(rest), 'node')} more in the same way, to {rest[-1][0]}")

    def _node(self, node: str, ranks: Sequence[Rank], columns: int, cell: int, width: int) -> RenderableType:
        colours = stage_colours(self.plan.pipeline_model_parallel_size)
        lines = []
        for start in range(0, len(ranks), columns):
            row = ranks[start : start + columns]
            for number in range(len(_lines(row[0]))):
                line = Text(no_wrap=True, overflow="crop")
                for rank in row:
                    colour = colours[rank.pipeline_parallel_rank]
                    style = Style(color=ink(colour), bgcolor=colour) if number else Style(dim=True)
                    line.append(_lines(rank)[number].ljust(cell), style).append(" ")
                line.right_crop(1)
                lines.append(line)
        return Panel(Group(*lines), title=Text(node), title_align="left", width=width)

    def _legend(self) -> Iterator[Text]:
        colours = stage_colours(self.plan.pipeline_model_parallel_size)
        lines = legend(self.plan, self.captions, is_short=True)
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
