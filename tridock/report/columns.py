"""Columns of numbers over iterations: millions of them fit into memory, and are thinned before they are drawn."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DRAWN: Final = 1200
"""Points drawn per curve at most: about the width of a chart in pixels."""


def number_of(value: object) -> float:
    """Returns a record's value as a number: NaN for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


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
        kept = [index for index, value in enumerate(self.y) if math.isfinite(value)]
        return Curve(array("d", (self.x[i] for i in kept)), array("d", (self.y[i] for i in kept)))

    def gaps(self) -> list[float]:
        """Returns the iterations whose value is not finite."""
        return [x for x, y in zip(self.x, self.y, strict=True) if not math.isfinite(y)]

    def thinned(self, points: int = DRAWN) -> Curve:
        """Returns at most ``points`` points: the lowest and the highest of each interval.

        A mean would hide spikes. The first and the last point stay. An interval without a finite value becomes one
        point, and so a gap.
        """
        size = len(self.x)
        if size <= points:
            return self
        intervals = max(1, (points - 2) // 2)
        kept = [0]
        for number in range(intervals):
            begin, end = 1 + number * (size - 2) // intervals, 1 + (number + 1) * (size - 2) // intervals
            interval = [index for index in range(begin, end) if math.isfinite(self.y[index])]
            if interval:
                kept += sorted({min(interval, key=self.y.__getitem__), max(interval, key=self.y.__getitem__)})
            else:
                kept.append(begin)
        kept.append(size - 1)
        return Curve(array("d", (self.x[i] for i in kept)), array("d", (self.y[i] for i in kept)))


class Columns:
    """A column per quantity and a row per logged iteration, in ascending order.

    A row for an earlier iteration replaces it and all that followed, because a run that resumes from a checkpoint
    repeats them.
    """

    def __init__(self) -> None:
        self._iterations: array[float] = array("d")
        self._columns: dict[str, array[float]] = {}
        self.returns = 0
        """Number of rows that were for an earlier iteration than the row before."""

    def __len__(self) -> int:
        return len(self._iterations)

    @property
    def last(self) -> int | None:
        return int(self._iterations[-1]) if self._iterations else None

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Adds a row; columns that it lacks get NaN."""
        if self._iterations and iteration <= self._iterations[-1]:
            self.returns += iteration < self._iterations[-1]
            self.cut(iteration)
        for name in values.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * len(self._iterations)
        self._iterations.append(iteration)
        for name, column in self._columns.items():
            column.append(values.get(name, math.nan))

    def put(self, name: str, values: array[float]) -> None:
        """Adds a whole column, as long as the others."""
        assert len(values) == len(self._iterations)
        self._columns[name] = values

    def cut(self, iteration: int) -> None:
        """Drops this iteration and all later ones."""
        row = bisect_left(self._iterations, iteration)
        for column in (self._iterations, *self._columns.values()):
            del column[row:]

    def curve(self, name: str) -> Curve:
        """Returns a column over the iterations; an empty curve if there is none of this name."""
        column = self._columns.get(name)
        return Curve(array("d"), array("d")) if column is None else Curve(self._iterations, column)

    def names(self) -> list[str]:
        return sorted(self._columns)
