"""Samples of an indexed data set, addressed by number.

A split is a range of whole documents, and so of tokens. Its sample k is tokens ``k * seq_length`` to
``(k + 1) * seq_length`` inclusive: ``seq_length + 1`` tokens, so that every position has a next token to predict.

The shuffled order is a function of (seed, split, epoch, position) alone. Sample number n of a run (n = consumed samples
+ position in the global batch) is therefore the same on any number of ranks and after any restart. The order is a
pseudo-random permutation (a Feistel network with cycle walking, Black and Rogaway 2002), which is computed on demand
and never stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tridock.contracts.events import Cause
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import manifest_path, read_manifest
from tridock.data.dataset.split import SPLITS, share_bounds
from tridock.errors import Problem, RequestError
from tridock.experiment.schema import Experiment

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


def split_bounds(documents: int, split: str) -> tuple[int, int, int, int]:
    """Returns the first documents of train, valid and test, and the end, for shares such as ``"949,50,1"``.

    Raises :class:`RequestError` if all shares are zero.
    """
    shares = [float(share) for share in split.split(",")]
    if sum(shares) == 0.0:
        raise RequestError(Problem("data.split", "has no share above zero", repr(split), "write e.g. '949,50,1'"))
    return share_bounds(documents, shares)


@dataclass(frozen=True)
class Samples:
    """The samples of one split; ``samples[n]`` for any n >= 0 is int64 [seq_length + 1]."""

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
        """A line that describes the data, to print."""
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

    def batches(
        self, first: int, count: int, micro_batch_size: int, rank: int, ranks: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yields this rank's micro-batches, int64 [micro batch, seq + 1], of ``count`` samples from number ``first``.

        Consecutive micro-batches go to consecutive ranks, so a step has the same samples on any number of ranks.
        """
        for start in range(first + rank * micro_batch_size, first + count, ranks * micro_batch_size):
            yield np.stack([self[number] for number in range(start, start + micro_batch_size)])


def resolve_vocab_size(experiment: Experiment, dataset: IndexedDataset) -> int:
    """Returns ``model.vocab_size``, or the data manifest's if the experiment omits it.

    Raises :class:`RequestError` if neither has it."""
    prefix = dataset.prefix
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.tokens != len(dataset.tokens):
        what = f"belongs to other data: {prefix.name}.bin holds {len(dataset.tokens)} tokens"
        todo = "copy all three files again, or build them again with `tridock data preprocess`"
        raise RequestError(Problem(str(manifest_path(prefix)), what, f"{manifest.tokens} tokens", todo))
    given = experiment.model.vocab_size
    if manifest is None:
        if given is None:
            todo = "add it, or make the data with `tridock data preprocess`, which writes it down"
            what = f"is left out, and {prefix.name}.json beside the data does not say it"
            raise RequestError(Problem("model.vocab_size", what, "", todo))
        return given
    if given is not None and given < manifest.vocab_size:
        what = f"is smaller than the tokenizer of the data, which has {manifest.vocab_size} tokens"
        raise RequestError(Problem("model.vocab_size", what, str(given), "leave it out, or raise it"))
    return given or manifest.vocab_size


def load_splits(experiment: Experiment, workspace: Path) -> dict[str, Samples]:
    """Returns the samples of train, valid and test.

    Raises :class:`RequestError` if the data is missing or too small for the experiment."""
    prefix = workspace / experiment.data.data_path
    dataset = IndexedDataset(prefix)
    vocab_size = resolve_vocab_size(experiment, dataset)
    bounds = split_bounds(dataset.documents, experiment.data.split)
    seq_length = experiment.model.seq_length
    splits = {}
    for number, name in enumerate(SPLITS):
        first, last = dataset.token_bounds(bounds[number], bounds[number + 1])
        seed = mixed_seed(experiment.train.seed, number)
        splits[name] = Samples(name, dataset.tokens[first:last], seq_length, vocab_size, seed)
    needed = ["train"] + (["valid"] if experiment.train.eval_interval else [])
    problems = [
        Problem(
            "data.split",
            f"leaves the {name} split less than one sample of {seq_length + 1} tokens",
            f"{len(splits[name].tokens)} tokens in {bounds[SPLITS.index(name) + 1] - bounds[SPLITS.index(name)]} of "
            f"{dataset.documents} documents of {prefix}",
            "give it a larger share, use more text, or shorten model.seq_length",
        )
        for name in needed
        if splits[name].per_epoch == 0
    ]
    if problems:
        raise RequestError(problems)
    return splits
