"""Samples of several data sets in one order, blended as Megatron does it.

With weights, the next sample comes from the data set that is furthest behind its share, as in megatron-core's
``build_blending_indices``; after ``BLOCK`` samples this order of data sets repeats. Without weights each sample of each
data set comes once an epoch, in an order shuffled over all. Both are functions of the sample's number alone, and each
data set has its own shuffled order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tridock.experiment.data_sets import BLOCK, DataSet
from tridock.train.data.dataset import Numbered, Samples, mixed_seed, shuffled


@dataclass(frozen=True)
class BlendedSamples(Numbered):
    """The samples of one split of several data sets; ``parts`` are those of each, as in ``sets``."""

    name: str
    seq_length: int
    vocab_size: int
    seed: int
    sets: tuple[DataSet, ...]
    parts: tuple[Samples, ...]

    @cached_property
    def per_epoch(self) -> int:
        sizes = [part.per_epoch for part in self.parts]
        if not self._shares:
            return sum(sizes)
        return min(int(size / share) for size, share in zip(sizes, self._shares, strict=True))

    @property
    def description(self) -> str:
        return f"a blend of {len(self.parts)} data sets, {self.per_epoch:,} samples of {self.seq_length}"

    def epochs(self, samples: int) -> Iterator[str]:
        """Yields a line about each data set: its share, and how often a run of so many samples reads it."""
        sizes = [part.per_epoch for part in self.parts]
        shares = self._shares or [size / sum(sizes) for size in sizes]
        for it, part, share, size in zip(self.sets, self.parts, shares, sizes, strict=True):
            yield f"{share:7.2%} {it.prefix}: {part.description} an epoch, {samples * share / size:.2f} epochs"

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        part, own = self.place(number)
        return self.parts[part][own]

    def place(self, number: int) -> tuple[int, int]:
        """Returns from which data set a sample comes, and its number there."""
        if self._shares:
            block, position = divmod(number, BLOCK)
            part = int(self._order[0][position])
            return part, block * int(self._counts[part]) + int(self._order[1][position])
        epoch, position = divmod(number, self.per_epoch)
        position = shuffled(position, self.per_epoch, mixed_seed(self.seed, epoch))
        part = int(np.searchsorted(self._ends, position, side="right"))
        size = self.parts[part].per_epoch
        return part, epoch * size + position - (int(self._ends[part]) - size)

    @cached_property
    def _shares(self) -> list[float]:
        weights = [it.weight for it in self.sets if it.weight is not None]
        return [weight / sum(weights) for weight in weights]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.array(list(accumulate(part.per_epoch for part in self.parts)))

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return blending_order(self._shares, BLOCK)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.bincount(self._order[0], minlength=len(self.parts))


def blending_order(shares: list[float], size: int) -> NDArray[np.int64]:
    """Returns int64 [2, size]: the data set of each sample, and the sample's number in it.

    ``shares`` have the sum 1. Source: ``build_blending_indices`` of megatron-core's ``helpers.cpp``.
    """
    wanted, taken, order = np.array(shares), np.zeros(len(shares), np.int64), np.empty((2, size), np.int64)
    for number in range(size):
        behind = int(np.argmax(wanted * max(number, 1) - taken))
        order[:, number] = behind, taken[behind]
        taken[behind] += 1
    return order
