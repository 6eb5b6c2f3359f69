"""Where everything of the drawn rank map goes. Lengths are inches, corners count from the lower left of the sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tridock.plan import Plan, Rank

MARGIN, HEAD, ENTRY, SWATCH = 0.35, 0.8, 0.22, 0.14
"""Around everything; the title and two lines below it; a line of the legend; the side of a colour before it."""
TITLE_PT, TEXT_PT = 14.0, 9.0
_ASPECT: Final = 1.4
"""Width over height that suits a screen and a page."""

Point = tuple[float, float]
Nodes = Mapping[str, Sequence[Rank]]
Measure = Callable[[str, float], float]
"""How wide a text is in a bold font of so many points."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The size of a slot, and of its words in points of 1/72 inch."""

    width: float
    height: float
    points: float

    @property
    def line(self) -> float:
        """The height of a line of its words."""
        return 1.35 * self.points / 72

    @property
    def gap(self) -> float:
        """Between nodes, and from a node's edge to its slots."""
        return self.points / 72

    @property
    def inset(self) -> float:
        """From a slot's edge to its colour. The outline of a tensor parallel group runs between."""
        return 0.07 * self.height


SLOTS: Final = ((32, Slot(0.95, 0.7, 10.0)), (256, Slot(0.74, 0.54, 7.5)), (1 << 30, Slot(0.6, 0.42, 5.8)))
"""For up to so many ranks."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """The nodes, and below them the entries of the legend."""

    slot: Slot
    slots_across: int
    node_width: float
    node_height: float
    nodes_across: int
    nodes_width: float
    entry_width: float
    entries_across: int
    foot: float
    """The height of the legend."""
    width: float
    height: float

    def node(self, number: int) -> Point:
        """The lower left corner of a node."""
        row, column = divmod(number, self.nodes_across)
        gap, top = self.slot.gap, self.height - MARGIN - HEAD
        return MARGIN + column * (self.node_width + gap), top - row * (self.node_height + gap) - self.node_height

    def slot_of(self, node: int, number: int) -> Point:
        """The lower left corner of a node's slot, by its place on the node."""
        (left, bottom), (row, column) = self.node(node), divmod(number, self.slots_across)
        top = bottom + self.node_height - 0.5 * self.slot.gap - self.slot.line
        return left + self.slot.gap + column * self.slot.width, top - (row + 1) * self.slot.height

    def entry(self, number: int) -> Point:
        """The left end of an entry of the legend, at half its height."""
        row, column = divmod(number, self.entries_across)
        return MARGIN + column * self.entry_width, MARGIN + self.foot - (row + 0.5) * ENTRY


def lay_out(plan: Plan, nodes: Nodes, least_width: float, entries: Sequence[str], measure: Measure) -> Sheet:
    """A sheet at least so wide between its margins, of a shape that suits the number of nodes."""
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
        ragged = 0.5 if len(nodes) % sheet.nodes_across else 0.0  # in whole rows the eye finds a pattern
        empty = math.log(sheet.width / (sheet.nodes_width + 2 * MARGIN))
        return abs(math.log(sheet.width / sheet.height / _ASPECT)) + ragged + empty

    return min((sheet(across) for across in range(1, len(nodes) + 1)), key=ill_shaped)


def _slots_across(most: int, tensor: int) -> int:
    """Four slots stand in a row, more in about two, and tensor parallel groups in whole rows where that can be."""
    if most <= 4:
        return most
    half = -(-most // 2)
    return min(range(3, 9), key=lambda across: (bool(across % tensor and tensor % across), abs(across - half)))


def tensor_outlines(plan: Plan, sheet: Sheet, nodes: Nodes) -> Iterator[tuple[bool, list[Point]]]:
    """Lines around the tensor parallel groups, and whether a group lies on other nodes too; none of a single rank's.

    Where a group goes on in the next row its outline is open.
    """
    tensor, inset = plan.tensor_model_parallel_size, 0.4 * sheet.slot.inset
    for node, ranks in enumerate(nodes.values() if tensor > 1 else ()):
        begin = 0
        for _, group in itertools.groupby(ranks, lambda rank: rank.rank // tensor):
            end = begin + len(list(group))
            for first, last, goes_on, went_on in _rows(begin, end, sheet.slots_across):
                left, top = sheet.slot_of(node, first)
                right, bottom = sheet.slot_of(node, last)
                left, top = left + inset, top + sheet.slot.height - inset
                right, bottom = right + sheet.slot.width - inset, bottom + inset
                for line in _around(left, bottom, right, top, went_on, goes_on):
                    yield end - begin < tensor, line
            begin = end


def _rows(begin: int, end: int, across: int) -> Iterator[tuple[int, int, bool, bool]]:
    """Rectangles that cover the slots from ``begin`` to before ``end``.

    Of each its first (upper left) and last slot, and whether the group goes on after it and went on before it.
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
