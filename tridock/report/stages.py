"""What the rank map says in the terminal and in a picture alike: words, colours of stages, the legend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tridock.plan import Plan, Rank

KEY: Final = "r5: rank 5; below it its place pp.dp.cp.tp: pipeline stage, data, context and tensor parallel rank"
"""How a slot is to be read."""

_APART: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Colours that the colour-blind tell apart (Okabe and Ito, 2008), black left to the lines."""
_RAMP: Final = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
"""Of more stages than that nobody knows each by its colour: matplotlib's viridis, dark to light, shows their order."""

_ROOM: Final = 16
"""A legend has a line for each stage up to so many."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the legend: stages ``first`` to ``last``, and what is said of them."""

    first: int
    last: int
    text: str


def legend(plan: Plan, captions: Mapping[int, str]) -> list[Line]:
    """Stages, their ranks and captions; of very many stages those that follow each other with the same caption in one.

    A stage's ranks follow each other: stages are what the plan numbers last.
    """
    ranks: dict[int, list[int]] = {}
    for rank in plan.ranks:
        ranks.setdefault(rank.pipeline_parallel_rank, []).append(rank.rank)
    lines = []
    few = len(ranks) <= _ROOM
    for _, alike in itertools.groupby(sorted(ranks), lambda stage: stage if few else captions.get(stage)):
        first, *others = alike
        last = others[-1] if others else first
        begin, end = ranks[first][0], ranks[last][-1]
        numbers = f"r{begin}" if begin == end else f"r{begin} to r{end}"
        caption = f": {captions[first]}" if first in captions else ""
        lines.append(Line(first, last, f"{span(first, last)} ({numbers}){caption}"))
    return lines


def span(first: int, last: int) -> str:
    """``stage 4``, ``stages 4 to 14``."""
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def stage_colours(stages: int) -> list[str]:
    """A colour for each stage, as ``#rrggbb``."""
    if stages <= len(_APART):
        return list(_APART[:stages])
    return [_between(stage * (len(_RAMP) - 1) / (stages - 1)) for stage in range(stages)]


def ink(colour: str) -> str:
    """Black or white: what is read better on a colour, by its relative luminance (WCAG 2.1)."""
    shares = [part / 255 for part in _parts(colour)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.18 else "#ffffff"


def place(rank: Rank) -> str:
    """Pipeline stage, data, context and tensor parallel rank: ``1.0.0.3``."""
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
    """The ranks of each node, in the plan's order."""
    nodes: dict[str, list[Rank]] = {}
    for rank in plan.ranks:
        nodes.setdefault(rank.node, []).append(rank)
    return nodes


def headline(plan: Plan) -> str:
    """``TP2 PP2 DP1: 4 ranks on 2 nodes``."""
    nodes = len(by_node(plan))
    return f"{plan.layout}: {_count(plan.world_size, 'rank')} on {_count(nodes, 'node')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
