"""Rotary position embeddings (Su et al., 2021), which pair the halves of a head, and the scaling of their periods."""

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from tridock.experiment.model import HIGH_FREQUENCY, LOW_FREQUENCY, Model

YARN_TURNS: Final = (32, 1)
"""YaRN's values (Peng et al., 2023): pairs that turn more often in the original context are not scaled, those that turn
less often are scaled by the whole factor."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, fp32 [sequence, rotary size / 2]."""


def rotation(model: Model, length: int, device: torch.device) -> Rotation:
    """Returns the rotation of each of the first ``length`` positions."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies(model, device))
    return angles.cos() * model.rotary_factor, angles.sin() * model.rotary_factor


def frequencies(model: Model, device: torch.device) -> Tensor:
    """Returns each pair's angle per position, fp32 [rotary size / 2]."""
    pairs = torch.arange(0, model.rotary_size, 2, dtype=torch.float32, device=device)
    plain = 1.0 / (model.rotary_base ** (pairs / model.rotary_size))
    if not model.use_rope_scaling:
        return plain
    kept = _KEPT[model.rope_scaling_type](model, plain)
    return (1 - kept) * plain / model.rope_scaling_factor + kept * plain


def _kept_by_llama3(model: Model, plain: Tensor) -> Tensor:
    """Returns the share of each frequency that is not scaled."""
    turns = model.original_max_position_embeddings * plain / (2 * math.pi)
    return ((turns - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)).clamp(0.0, 1.0)


def _kept_by_yarn(model: Model, plain: Tensor) -> Tensor:
    size, context = model.rotary_size, model.original_max_position_embeddings
    first, last = (
        size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base)) for turns in YARN_TURNS
    )
    low, high = max(math.floor(first), 0), min(math.ceil(last), size - 1)
    pairs = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    return 1 - ((pairs - low) / (high - low or 0.001)).clamp(0.0, 1.0)


_KEPT: Final[Mapping[str, Callable[[Model, Tensor], Tensor]]] = {
    "llama3": _kept_by_llama3,
    "linear": lambda _, plain: torch.zeros_like(plain),
    "yarn": _kept_by_yarn,
}


def rotated(x: Tensor, by: Rotation) -> Tensor:
    """Returns queries or keys, ``x`` [batch, sequence, heads, head size], each rotated by its position."""
    cosines, sines = (it.to(x.dtype).unsqueeze(1) for it in by)
    half = cosines.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), -1)
