"""Samples of an indexed data set, addressed by number.

A split is a range of whole documents, and so of tokens. Its sample k is tokens ``k * seq_length`` to
``(k + 1) * seq_length`` inclusive: ``seq_length + 1`` tokens, so that every position has a next token to predict.

The shuffled order is a function of (seed, split, epoch, position) alone. Sample number n of a run (n = consumed samples
+ position in the global batch) is therefore the same on any number of ranks and after any restart. The order is a
pseudo-random permutation (a Feistel network with cycle walking, Black and Rogaway 2002), which is computed on demand
and never stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tridock.contracts.events import Cause
from tridock.errors import Problem, RequestError

_ROUNDS: Final = 6
_MASK64: Final = (1 << 64) - 1


def mix64(value: int) -> int:
    """Returns a 64-bit hash of an integer (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mixed_seed(*parts: int) -> int:
    """Returns a 64-bit seed that depends on all of ``parts``."""
    seed = 0
    for part in parts:
        seed = mix64(seed ^ mix64(part))
    return seed


def shuffled(position: int, size: int, seed: int) -> int:
    """Returns the image of ``position`` under a pseudo-random permutation of ``range(size)``."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [mix64(seed + number) for number in range(_ROUNDS)]
    while True:
        left, right = position >> half, position & mask
        for key in keys:
            left, right = right, left ^ (mix64(key ^ right) & mask)
        position = left << half | right
        if position < size:  # otherwise walk the cycle until it is in range, which keeps this a permutation
            return position


class Numbered(ABC):
    """The samples of one split; ``samples[n]`` for any n >= 0 is int64 [seq_length + 1]."""

    name: str
    seq_length: int
    vocab_size: int

    @abstractmethod
    def __getitem__(self, number: int) -> NDArray[np.int64]: ...

    @property
    @abstractmethod
    def per_epoch(self) -> int:
        """Samples in which none is repeated."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A line that describes the data, to print."""

    def batches(
        self, first: int, count: int, micro_batch_size: int, rank: int, ranks: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yields this rank's micro-batches, int64 [micro batch, seq + 1], of ``count`` samples from number ``first``.

        Consecutive micro-batches go to consecutive ranks, so a step has the same samples on any number of ranks.
        """
        for start in range(first + rank * micro_batch_size, first + count, ranks * micro_batch_size):
            yield np.stack([self[number] for number in range(start, start + micro_batch_size)])


@dataclass(frozen=True)
class Samples(Numbered):
    """The samples of one split of one data set."""

    name: str
    tokens: NDArray[Any]
    seq_length: int
    vocab_size: int
    seed: int

    @property
    def per_epoch(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    @property
    def description(self) -> str:
        return f"{len(self.tokens):,} training tokens, {self.per_epoch:,} samples of {self.seq_length}"

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        epoch, position = divmod(number, self.per_epoch)
        position = shuffled(position, self.per_epoch, mixed_seed(self.seed, epoch))
        start = position * self.seq_length
        return self.checked(np.asarray(self.tokens[start : start + self.seq_length + 1], dtype=np.int64))

    def checked(self, sample: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sample; raises :class:`RequestError` for a token outside the vocabulary."""
        if int(sample.max()) >= self.vocab_size:
            raise RequestError(
                Problem(
                    "model.vocab_size",
                    "is too small for the data",
                    f"{self.vocab_size}, and token {int(sample.max())} in the {self.name} split",
                    "leave it out, or give the size of the tokenizer of the data",
                    cause=Cause.TOKEN_OUTSIDE_VOCABULARY,
                )
            )
        return sample
