"""Megatron-LM v1.1.5's index maps: arrays beside a data set, under names that the data and the arguments determine."""

import glob
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tridock.errors import Problem


def index_maps(prefix: Path) -> list[Path]:
    """Returns the index maps beside a data set, by name."""
    return sorted(prefix.parent.glob(f"{glob.escape(prefix.name)}_*_indexmap_*.npy"))


def foreign_maps(prefix: Path) -> Iterator[Problem]:
    """Yields the index maps that are no arrays: NumPy would read a pickle, which can run any code. An empty one stays,
    because another run may just write it."""
    for path in index_maps(prefix):
        if not path.is_file() or _beginning(path) not in (b"", np.lib.format.MAGIC_PREFIX):
            todo = "remove it: a run makes its index maps itself"
            yield Problem(str(path), "is no array of NumPy, as every index map is", "", todo)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(np.lib.format.MAGIC_PREFIX))
