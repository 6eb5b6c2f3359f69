"""Where each rank runs: the plan's nodes and slots, in the terminal and as a picture."""

from __future__ import annotations

import io
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError
from tridock.plan import Plan, Rank
from tridock.report.stages import KEY, by_node, headline, ink, legend, place, span, stage_colours

_MANY: Final = 16
"""Of more nodes those that follow each other and are alike are shown once."""
_KINDS: Final = 8
_FIRST: Final = 4
"""Of more kinds of nodes than ``_KINDS`` the first four are shown, and the last."""
_DPI: Final = 150
_LARGEST: Final = 12_000
"""Pixels of a PNG's longer side at most."""
_METADATA: Final[dict[str, dict[str, None]]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
"""What matplotlib would write about itself and the day."""


def render(plan: Plan, captions: Mapping[int, str] | None = None) -> RenderableType:
    """The rank map for a terminal, as wide as it is; every word of it is readable without colour.

    ``captions`` say something about a stage in the legend (``12.3 GiB, tight``), by its number.
    """
    return _RankMap(plan, captions or {})


def plot(plan: Plan, path: Path, title: str, captions: Mapping[int, str] | None = None) -> None:
    """Draws the rank map into ``path``, as PNG or SVG by its suffix: the same bytes for the same arguments.

    Raises :class:`RequestError` for any other suffix. ``captions`` as for :func:`render`.
    """
    picture = path.suffix.lower().removeprefix(".")
    if picture not in _METADATA:
        what, todo = "the rank map is drawn as PNG or SVG", "end the file's name in .png or .svg"
        raise RequestError(Problem(str(path), what, path.suffix or "no suffix", todo))

    import matplotlib as mpl

    from tridock.report.rank_picture import draw

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "tridock", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figure = draw(plan, title, captions or {})
        resolution = min(_DPI, _LARGEST / max(figure.get_size_inches()))
        figure.savefig(buffer, format=picture, dpi=resolution, metadata=_METADATA[picture])
    run_folder.write_atomic(path, buffer.getvalue())


@dataclass(frozen=True, slots=True)
class _Box:
    """A node, and how many that follow are like it but for the numbers of their ranks and replicas."""

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
            yield Text(_left_out(boxes[_FIRST:-1]))
            yield self._nodes(boxes[-1:], boxes, width)
        yield Text(KEY)
        yield Columns(list(self._legend()), padding=(0, 2))

    def _nodes(self, shown: Sequence[_Box], boxes: Sequence[_Box], width: int) -> RenderableType:
        """Boxes side by side. They are all of one size, whichever of them are shown here."""
        cell = max(len(word) for rank in self.plan.ranks for word in _words(rank))
        slots = max(len(box.ranks) for box in boxes)
        columns = _columns(slots, max(1, (width - 3) // (cell + 1)))
        names = max(len(word) + 6 for box in boxes for word in (box.node, box.note))
        each = min(width, max(columns * (cell + 1) + 3, names))
        return Columns([self._node(box, columns, cell, each) for box in shown], padding=(0, 1))

    def _node(self, box: _Box, columns: int, cell: int, width: int) -> RenderableType:
        colours = stage_colours(self.plan.pipeline_model_parallel_size)
        lines = []
        for start in range(0, len(box.ranks), columns):
            row = box.ranks[start : start + columns]
            for number in range(len(_words(row[0]))):
                line = Text(no_wrap=True, overflow="crop")
                for rank in row:
                    colour = colours[rank.pipeline_parallel_rank]
                    style = Style(color=ink(colour), bgcolor=colour) if number else Style(dim=True)
                    line.append(_words(rank)[number].ljust(cell), style).append(" ")
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
        for line in legend(self.plan, self.captions):
            swatch = Text()
            for stage in dict.fromkeys((line.first, line.last)):
                swatch.append("  ", Style(bgcolor=colours[stage]))
            yield swatch.append(f" {line.text}")


def _words(rank: Rank) -> tuple[str, str, str]:
    return f"slot {rank.slot}", f"r{rank.rank}", place(rank)


def _columns(slots: int, fitting: int) -> int:
    """How many slots go in a line where so many fit: all, or as many in each line."""
    lines = -(-slots // fitting)
    return -(-slots // lines)


def _boxes(plan: Plan) -> list[_Box]:
    """The nodes; of many, each that differs from the one before by more than its ranks' and replicas' numbers."""
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


def _left_out(boxes: Sequence[_Box]) -> str:
    nodes = [node for box in boxes for node in (box.node, *box.alike)]
    first, last = boxes[0].ranks[0], boxes[-1].ranks[-1]
    stages = span(first.pipeline_parallel_rank, last.pipeline_parallel_rank)
    return f"... {len(nodes)} more nodes, {nodes[0]} to {nodes[-1]}: {stages} ..."
