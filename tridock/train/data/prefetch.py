"""Reads the next batches in a thread during the current step, into pinned memory on GPUs."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tridock.train.data.dataset import Numbered
from tridock.train.data.images import ImageSamples
from tridock.train.parallel.strategies import Batch

Arrays = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
Split = Numbered | ImageSamples
Read = Callable[[Split, int], Iterable[Arrays]]
"""Returns this rank's micro-batches of the global batch that starts at a sample number."""


class Prefetcher:
    """Reads ahead of the training loop.

    A thread suffices: the files are memory-mapped, and nothing is computed. An error while reading ahead is raised when
    the batch is requested.
    """

    def __init__(self, read: Read, device: torch.device) -> None:
        self._read, self._device = read, device
        self._pins = device.type == "cuda"
        # Pinning creates a context on the thread's current GPU, which is the first one by default, on every rank.
        prepare = (lambda: torch.cuda.set_device(device)) if self._pins else None
        self._thread = ThreadPoolExecutor(1, "batches", prepare)
        self._ahead: dict[tuple[str, int], Future[list[Batch]]] = {}

    def get(self, samples: Split, first: int, then: int | None) -> list[Batch]:
        """Returns the micro-batches from sample ``first`` on the rank's device; begins to read those from ``then``."""
        found = self._ahead.pop((samples.name, first), None) or self._thread.submit(self._make, samples, first)
        batches = found.result()
        if then is not None:
            self._ahead[samples.name, then] = self._thread.submit(self._make, samples, then)
        return [_each(batch, lambda tensor: tensor.to(self._device, non_blocking=True)) for batch in batches]

    def _make(self, samples: Split, first: int) -> list[Batch]:
        batches: list[Batch] = [_each(arrays, torch.from_numpy) for arrays in self._read(samples, first)]
        return [_each(batch, Tensor.pin_memory) for batch in batches] if self._pins else batches


def _each(batch: Any, change: Callable[[Any], Tensor]) -> Batch:
    return (change(batch[0]), change(batch[1])) if isinstance(batch, tuple) else change(batch)
