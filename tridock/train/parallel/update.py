"""The update of engine ``torch``'s own strategies: clip, unscale, step. Nothing here waits for the device."""

import math
from typing import Any

import torch
from torch import Tensor

from tridock.train.parallel.loss_scale import LossScaler


def clip_and_step(
    optimizer: Any, gradients: list[Tensor], norm: Tensor, scaler: LossScaler, clip_grad: float, lr: float
) -> Tensor:
    """Runs one update by a fused optimizer, which skips it on the device if the gradient is not finite.

    ``norm`` is the 2-norm of the scaled gradient. Returns the unscaled norm before clipping; infinity if the gradient
    is not finite.
    """
    overflow = ~torch.isfinite(norm)
    norm = (norm.double() / scaler.scale).masked_fill(overflow, math.inf)
    # 1e-6 as in torch's clip_grad_norm_ and in Megatron
    factor = torch.full_like(norm, clip_grad or math.inf).div(norm + 1e-6).clamp(max=1.0) / scaler.scale
    torch._foreach_mul_(gradients, factor.float())
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = overflow.float()
    optimizer.step()
    scaler.update(overflow)
    return norm
