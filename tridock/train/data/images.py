"""Images and labels from two memory-mapped NumPy arrays, addressed by number.

The image of a sample depends on (seed, split, epoch, position) alone, as for tokens
(:mod:`tridock.train.data.dataset`). So does its horizontal flip, which half of the training samples have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tridock.contracts.data_index import SPLITS, split_bounds
from tridock.contracts.images import SUFFIXES, ImageArrays, not_an_array
from tridock.errors import RequestError, reason_of
from tridock.experiment.inputs import image_problems
from tridock.experiment.schema import Experiment
from tridock.train.data.dataset import mixed_seed, shuffled

_ORDER: Final = 0x696D616765
"""Seeds the order in which images are assigned to the splits, because files are often sorted by label."""


@dataclass(frozen=True)
class ImageSamples:
    """Images ``first`` to ``last`` of the data set's fixed random order."""

    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    first: int
    last: int
    seed: int
    flips: bool
    vocab_size: int
    """The number of classes."""

    @property
    def per_epoch(self) -> int:
        return self.last - self.first

    @property
    def description(self) -> str:
        """A line that describes the data, to print."""
        height, width = self.images.shape[2:]
        return f"{self.per_epoch:,} training images of {height} x {width}"

    def __getitem__(self, number: int) -> tuple[NDArray[np.uint8], np.int64]:
        epoch, position = divmod(number, self.per_epoch)
        position = shuffled(position, self.per_epoch, mixed_seed(self.seed, epoch))
        place = shuffled(self.first + position, len(self.labels), _ORDER)
        image = self.images[place]
        flipped = self.flips and mixed_seed(self.seed, epoch, position, 1) % 2
        return image[:, :, ::-1] if flipped else image, self.labels[place]

    def batches(
        self, first: int, count: int, micro_batch_size: int, rank: int, ranks: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yields this rank's micro-batches, as :meth:`tridock.train.data.dataset.Samples.batches`.

        Each has images, uint8 [micro batch, 3, height, width], and labels, int64 [micro batch].
        """
        for start in range(first + rank * micro_batch_size, first + count, ranks * micro_batch_size):
            images, labels = zip(*(self[number] for number in range(start, start + micro_batch_size)), strict=True)
            yield np.stack(images), np.array(labels, dtype=np.int64)


def load_images(experiment: Experiment, workspace: Path) -> dict[str, ImageSamples]:
    """Returns the samples of train, valid and test.

    Raises :class:`RequestError` if the arrays are missing or do not fit the model."""
    paths = [Path(f"{workspace / experiment.data.prefix}{suffix}") for suffix in SUFFIXES]
    images, labels = (_mapped(path) for path in paths)
    found = (int(labels.min()), int(labels.max())) if labels.size and labels.dtype == np.int64 else None
    arrays = ImageArrays((images.dtype.str, images.shape), (labels.dtype.str, labels.shape), found)
    prefix = str(workspace / experiment.data.prefix)
    RequestError.raise_for(image_problems(experiment, prefix, arrays))
    bounds = split_bounds(len(labels), experiment.data.split)
    return {
        name: ImageSamples(
            name,
            images,
            labels,
            first,
            last,
            seed=mixed_seed(experiment.train.seed, number),
            flips=number == 0,
            vocab_size=experiment.model.num_classes or 0,
        )
        for number, (name, (first, last)) in enumerate(zip(SPLITS, pairwise(bounds), strict=True))
    }


def _mapped(path: Path) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise not_an_array(path, reason_of(error)) from None
    return found
