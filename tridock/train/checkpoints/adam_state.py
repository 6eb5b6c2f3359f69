"""Adam's states of a parameter before its first step, equal to those that torch's AdamW creates."""

from typing import Final

import torch
from torch import Tensor

VECTORS: Final = ("exp_avg", "exp_avg_sq")


def fresh_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns zero states to load a checkpoint into. A fused optimizer's step count is on the parameter's device."""
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return {"step": step, **{name: torch.zeros_like(parameter.detach()) for name in VECTORS}}
