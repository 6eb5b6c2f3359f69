"""Memory that a process and those it forks see alike: what workers make goes through it, and through no pipe."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where arrays lie: the slot, and of each its type and its number of elements, one behind the other."""

    slot: int
    parts: tuple[tuple[str, int], ...]


class Slots:
    """``count`` pieces of ``size`` bytes each; those that nothing was written to take no memory.

    The process that made them takes a slot for each piece of work, a worker puts arrays there, and the arrays that
    ``taken`` gives keep the slot as long as they live.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, count * size)
        self._free = list(range(count))

    def take(self) -> int | None:
        """A slot that nobody uses, or None where there is none."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """The slot may be taken again."""
        self._free.append(slot)

    def put(self, slot: int, arrays: Sequence[Array]) -> Placed | None:
        """Copies the arrays there; None where they do not fit."""
        if sum(array.nbytes for array in arrays) > self._size:
            return None
        start = slot * self._size
        for array in arrays:
            self._at(start, array.dtype.str, array.size)[:] = array
            start += array.nbytes
        return Placed(slot, tuple((array.dtype.str, array.size) for array in arrays))

    def taken(self, placed: Placed) -> list[Array]:
        """The arrays, where they lie. When the last of them is let go of, the slot is free."""
        whole = self._at(placed.slot * self._size, "u1", self._size)
        weakref.finalize(whole, self.give, placed.slot)
        arrays, start = [], 0
        for dtype, size in placed.parts:
            end = start + np.dtype(dtype).itemsize * size
            arrays.append(whole[start:end].view(dtype))
            start = end
        return arrays

    def _at(self, start: int, dtype: str, size: int) -> Array:
        return np.frombuffer(self._memory, dtype, size, start)
