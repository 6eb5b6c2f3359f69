"""Adam's states of a parameter before its first step, equal to those that torch's AdamW creates; its settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

VECTORS: Final = ("exp_avg", "exp_avg_sq")
_SETTINGS: Final = ("weight_decay", "betas", "eps")


def fresh_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns zero states to load a checkpoint into. A fused optimizer's step count is on the parameter's device."""
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return {"step": step, **{name: torch.zeros_like(parameter.detach()) for name in VECTORS}}


@contextmanager
def keeping_settings(optimizer: Any) -> Iterator[None]:
    """Lets an optimizer load a checkpoint, which would also replace its settings, those of the experiment."""
    groups = [{name: group[name] for name in _SETTINGS if name in group} for group in optimizer.param_groups]
    clip_grad = getattr(optimizer, "clip_grad", None)  # DeepSpeed's
    yield
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group.update(own)
    if clip_grad is not None:
        optimizer.clip_grad = clip_grad
