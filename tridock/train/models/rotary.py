"""Rotary position embeddings (Su et al., 2021), which pair the halves of a head, with Llama 3.1's frequency scaling."""

import math

import torch
from torch import Tensor

from tridock.experiment.model import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_CONTEXT, Model

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, fp32 [sequence, rotary size / 2]."""


def rotation(model: Model, length: int, device: torch.device) -> Rotation:
    """Returns the rotation of each of the first ``length`` positions."""
    pairs = torch.arange(0, model.rotary_size, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (model.rotary_base ** (pairs / model.rotary_size))
    if model.use_rope_scaling:
        frequencies = _scaled(frequencies, model.rope_scaling_factor)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()


def _scaled(frequencies: Tensor, factor: float) -> Tensor:
    turns = ORIGINAL_CONTEXT * frequencies / (2 * math.pi)
    share = ((turns - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)).clamp(0.0, 1.0)
    return (1 - share) * frequencies / factor + share * frequencies


def rotated(x: Tensor, by: Rotation) -> Tensor:
    """Returns queries or keys, ``x`` [batch, sequence, heads, head size], each rotated by its position."""
    cosines, sines = (it.to(x.dtype).unsqueeze(1) for it in by)
    half = cosines.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), -1)
