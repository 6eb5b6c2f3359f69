"""Random numbers of one tensor parallel rank alone, beside those that all of them draw alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

TENSOR_PARALLEL_OFFSET: Final = 2718
"""Megatron's: between the seed of what all tensor parallel ranks draw, and that of what the first draws alone."""


@contextmanager
def own_random_numbers(tensor_parallel_rank: int, device: torch.device) -> Iterator[None]:
    """Inside, a rank draws other numbers than its tensor parallel neighbours; afterwards the same ones again.

    Their seed is drawn from the host's generator, which all neighbours have alike: whoever puts that back, as a
    resumed run and the recomputation of activations do, has these numbers again too.
    """
    seed = int(torch.randint(1 << 62, (), device="cpu")) + TENSOR_PARALLEL_OFFSET + tensor_parallel_rank
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    shared = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(shared)
