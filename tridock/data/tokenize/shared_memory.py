"""Shared memory of forked processes: carries lines to a worker, and token ids back."""

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """Consecutive arrays in a slot, each by its type and number of elements."""

    slot: int
    parts: tuple[tuple[str, int], ...]


class Slots:
    """``count`` slots of ``size`` bytes in memory that forked processes share. Unused slots take no memory.

    The parent acquires a slot per task, a worker writes arrays to it, and the arrays that ``read`` returns keep the
    slot until they are garbage-collected.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, count * size)
        self._free = list(range(count))

    def acquire(self) -> int | None:
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def write(self, slot: int, arrays: Sequence[Array]) -> SlotArrays | None:
        """Copies arrays to a slot. Returns None if they do not fit."""
        if sum(array.nbytes for array in arrays) > self._size:
            return None
        start = slot * self._size
        for array in arrays:
            self._at(start, array.dtype.str, array.size)[:] = array
            start += array.nbytes
        return SlotArrays(slot, tuple((array.dtype.str, array.size) for array in arrays))

    def write_bytes(self, slot: int, data: bytes) -> bool:
        """Copies bytes to a slot. Returns False if they do not fit."""
        if len(data) > self._size:
            return False
        self._memory[slot * self._size : slot * self._size + len(data)] = data
        return True

    def read_bytes(self, slot: int, size: int) -> bytes:
        """Returns a copy of the ``size`` bytes that ``write_bytes`` wrote."""
        return self._memory[slot * self._size : slot * self._size + size]

    def read(self, placed: SlotArrays) -> list[Array]:
        """Returns views of the arrays. The slot is released with the last of them."""
        whole = self._at(placed.slot * self._size, "u1", self._size)
        weakref.finalize(whole, self.release, placed.slot)
        arrays, start = [], 0
        for dtype, size in placed.parts:
            end = start + np.dtype(dtype).itemsize * size
            arrays.append(whole[start:end].view(dtype))
            start = end
        return arrays

    def _at(self, start: int, dtype: str, size: int) -> Array:
        return np.frombuffer(self._memory, dtype, size, start)
