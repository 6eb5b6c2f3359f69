"""Numbers over iterations, compact: millions of logged iterations fit in memory, and are thinned to be drawn."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DRAWN: Final = 1200
"""So many points of a curve are drawn at most; a chart is about as many pixels wide."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at ascending iterations; a value may be NaN."""

    x: array[float]
    y: array[float]

    def __len__(self) -> int:
        return len(self.x)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.y if math.isfinite(value)]

    def without_gaps(self) -> Curve:
        """Only the points that have a finite value."""
        kept = [index for index, value in enumerate(self.y) if math.isfinite(value)]
        return Curve(array("d", (self.x[i] for i in kept)), array("d", (self.y[i] for i in kept)))

    def gaps(self) -> list[float]:
        """The iterations whose value is not finite."""
        return [x for x, y in zip(self.x, self.y, strict=True) if not math.isfinite(y)]

    def thinned(self, points: int = DRAWN) -> Curve:
        """At most so many points that look the same: of each stretch of neighbours its lowest and its highest.

        A mean would hide the spikes that one looks for. The first and the last point stay; a stretch without any finite
        value stays one point, and so a gap.
        """
        size = len(self.x)
        if size <= points:
            return self
        stretches = max(1, (points - 2) // 2)
        kept = [0]
        for number in range(stretches):
            begin, end = 1 + number * (size - 2) // stretches, 1 + (number + 1) * (size - 2) // stretches
            stretch = [index for index in range(begin, end) if math.isfinite(self.y[index])]
            if stretch:
                kept += sorted({min(stretch, key=self.y.__getitem__), max(stretch, key=self.y.__getitem__)})
            else:
                kept.append(begin)
        kept.append(size - 1)
        return Curve(array("d", (self.x[i] for i in kept)), array("d", (self.y[i] for i in kept)))


class Columns:
    """A column for each kind of number, a row for each logged iteration, in ascending order.

    What comes with an iteration that was there before, or with an earlier one, stands for it and all that followed: a
    run that goes on from a checkpoint does them once more.
    """

    def __init__(self) -> None:
        self._iterations: array[float] = array("d")
        self._columns: dict[str, array[float]] = {}
        self.returns = 0
        """How often the iterations went back."""

    def __len__(self) -> int:
        return len(self._iterations)

    @property
    def last(self) -> int | None:
        """The last iteration; None where there is none."""
        return int(self._iterations[-1]) if self._iterations else None

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """A row; a column that it does not name has NaN there."""
        if self._iterations and iteration <= self._iterations[-1]:
            self.returns += iteration < self._iterations[-1]
            self.cut(iteration)
        for name in values.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * len(self._iterations)
        self._iterations.append(iteration)
        for name, column in self._columns.items():
            column.append(values.get(name, math.nan))

    def put(self, name: str, values: array[float]) -> None:
        """A whole column, as long as the others."""
        assert len(values) == len(self._iterations)
        self._columns[name] = values

    def cut(self, iteration: int) -> None:
        """Drops this iteration and all that follow."""
        row = bisect_left(self._iterations, iteration)
        for column in (self._iterations, *self._columns.values()):
            del column[row:]

    def curve(self, name: str) -> Curve:
        """A column over the iterations; an empty one where none has this name."""
        column = self._columns.get(name)
        return Curve(array("d"), array("d")) if column is None else Curve(self._iterations, column)

    def names(self) -> list[str]:
        """The columns there are, in alphabetical order."""
        return sorted(self._columns)
