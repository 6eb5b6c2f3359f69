"""What a model of transformers predicts, for comparisons with other programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def exact_logits(model: Any, tokens: Tensor) -> Tensor:
    """In fp64: transformers' fp32 has been 1e-4 off, once, in the first forward pass of a process."""
    model.set_experts_implementation("eager")  # the fast one of a mixture has no fp64
    with torch.no_grad():
        logits: Tensor = model.double()(tokens).logits
    return logits
