"""Many lengths in little memory: counted by size, exactly as far as 8192 tokens and above it to 0.02 %."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_FRACTION: Final = 12
"""Bits kept below the leading one: two lengths fall together only where they differ by less than 2**-12."""
_EXPONENTS: Final = 64
_BINS: Final = (_EXPONENTS << _FRACTION) + 1


@dataclass(frozen=True, slots=True)
class Bar:
    """Lengths ``first`` to ``last``, both included, and how many there are."""

    first: int
    last: int
    count: int


class Lengths:
    """Counts of lengths: int64 of at least 0, added in blocks."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self.count = 0
        self.total = 0
        self.min = 0
        self.max = 0

    def add(self, lengths: NDArray[Any]) -> None:
        """Counts a block."""
        if not len(lengths):
            return
        low, high = int(lengths.min()), int(lengths.max())
        self.min = min(self.min, low) if self.count else low
        self.max = max(self.max, high)
        self.count += len(lengths)
        self.total += int(lengths.sum(dtype=np.int64))
        self._counts += np.bincount(_bins(lengths), minlength=_BINS)

    @property
    def mean(self) -> float:
        """0 where there are none."""
        return self.total / max(self.count, 1)

    def quantile(self, share: float) -> int:
        """The smallest length that at least ``share`` of all do not exceed; 0 where there are none."""
        if not self.count:
            return 0
        rank = max(1, int(np.ceil(share * self.count)))
        number = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(max(_smallest(number), self.min), self.max)

    def bars(self) -> list[Bar]:
        """The histogram, a bar for each power of two: 0, 1, 2-3, 4-7, ..., from the first to the last that has any."""
        bars = [Bar(0, 0, int(self._counts[0]))]
        for exponent in range(_EXPONENTS - 1):
            begin = 1 + (exponent << _FRACTION)
            count = int(self._counts[begin : begin + (1 << _FRACTION)].sum())
            bars.append(Bar(1 << exponent, (2 << exponent) - 1, count))
        used = [number for number, bar in enumerate(bars) if bar.count]
        return bars[used[0] : used[-1] + 1] if used else []


def _bins(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """0 for 0; else exponent and first bits of the length, as a double holds them: 1 and more."""
    bits = lengths.astype(np.float64).view(np.int64) >> (52 - _FRACTION)
    return np.where(lengths > 0, bits - (1023 << _FRACTION) + 1, 0)


def _smallest(number: int) -> int:
    """The smallest length of a bin."""
    if number == 0:
        return 0
    exponent, fraction = divmod(number - 1, 1 << _FRACTION)
    return -(-((1 << _FRACTION | fraction) << exponent) >> _FRACTION)
