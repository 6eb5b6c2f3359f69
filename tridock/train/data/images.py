"""Images and labels from two memory-mapped NumPy arrays, addressed by number.

The image of a sample depends on (seed, split, epoch, position) alone, as for tokens
(:mod:`tridock.train.data.dataset`). So does its horizontal flip, which half of the training samples have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tridock.data.dataset.split import SPLITS
from tridock.errors import Problem, RequestError
from tridock.experiment.inputs import IMAGE_SUFFIXES
from tridock.experiment.schema import Experiment
from tridock.train.data.dataset import mixed_seed, shuffled, split_bounds

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
    model = experiment.model
    paths = [Path(f"{workspace / experiment.data.data_path}{suffix}") for suffix in IMAGE_SUFFIXES]
    images, labels = (_mapped(path) for path in paths)
    problems = []
    shape = (3, model.img_h, model.img_w)
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        what, todo = f"must be uint8 of [N, {', '.join(map(str, shape))}]", "set model.img_h and model.img_w"
        problems.append(
            Problem(str(paths[0]), what, f"{images.dtype} of {list(images.shape)}", f"{todo}, or correct it")
        )
    if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        what, got = f"must be int64 of [{len(images)}]", f"{labels.dtype} of {list(labels.shape)}"
        problems.append(Problem(str(paths[1]), what, got, "create it again, with one label per image"))
    elif len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < (model.num_classes or 0):
        what, got = f"has labels outside 0 to {(model.num_classes or 0) - 1}", f"{labels.min()} to {labels.max()}"
        problems.append(Problem(str(paths[1]), what, got, "raise model.num_classes"))
    if problems:
        raise RequestError(problems)
    bounds = split_bounds(len(labels), experiment.data.split)
    splits = {
        name: ImageSamples(
            name, images, labels, *bounds[number : number + 2], mixed_seed(experiment.train.seed, number), number == 0
        )
        for number, name in enumerate(SPLITS)
    }
    needed = ["train"] + (["valid"] if experiment.train.eval_interval else [])
    empty = [
        Problem(
            "data.split", f"leaves the {name} split no image", f"{len(labels)} images in all", "give it a larger share"
        )
        for name in needed
        if not splits[name].per_epoch
    ]
    if empty:
        raise RequestError(empty)
    return splits


def _mapped(path: Path) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        todo = "save it with numpy.save, or set data.data_path to what stands before the ending"
        raise RequestError(Problem(str(path), "cannot be read as an array of numpy", got, todo)) from None
    return found
