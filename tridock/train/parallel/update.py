"""The update of engine ``torch``'s own strategies: clip, unscale, step. Nothing here waits for the device.

fp16 loss scaling has the rules of DeepSpeed's and Megatron's dynamic scaler. torch's GradScaler has no hysteresis, and
an experiment must behave the same under every strategy. The scale is on the rank's device.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

from tridock.experiment.schema import LossScale, Precision

_SMALLEST: Final = 1.0


class LossScaler:
    """The factor ``scale`` of the loss; ``update(overflow)`` after every step adapts it.

    It is 1 unless the precision is fp16, and fixed if ``loss_scale`` is set. Otherwise it starts at
    2 ** initial_scale_power, halves after ``hysteresis`` overflows, and doubles after ``loss_scale_window`` good steps.
    """

    def __init__(self, settings: LossScale, precision: Precision, device: torch.device) -> None:
        self.settings = settings
        self.dynamic = precision == "fp16" and settings.loss_scale == 0.0
        scale = settings.loss_scale or 2.0**settings.initial_scale_power if precision == "fp16" else 1.0
        state = torch.tensor([scale, 0.0, settings.hysteresis], dtype=torch.float64).to(device)
        self.scale, self.good_steps, self.overflows_left = state.unbind()

    def scaled(self, loss: Tensor, parts: int = 1) -> Tensor:
        """Returns the scaled loss of one of ``parts`` micro-batches, to start the backward pass with."""
        return loss * (self.scale / parts).float()

    def update(self, overflow: Tensor) -> None:
        """Adapts the scale after a step; ``overflow`` is a bool scalar on the scaler's device."""
        if not self.dynamic:
            return
        left = self.overflows_left - overflow.double()
        halves = overflow & (left <= 0)
        # Counts like DeepSpeed: the scale doubles at the first good step after a full window of good steps.
        doubles = ~overflow & (self.good_steps > 0) & (self.good_steps % self.settings.loss_scale_window == 0)
        smaller = (self.scale / 2.0).clamp(min=_SMALLEST)
        self.scale = torch.where(halves, smaller, torch.where(doubles, self.scale * 2.0, self.scale))
        self.overflows_left = left.masked_fill(doubles, self.settings.hysteresis).masked_fill(halves, 1.0)
        self.good_steps = (self.good_steps + 1.0).masked_fill(overflow, 0.0)

    def state(self) -> dict[str, float]:
        """Returns the state to save in a checkpoint. Waits for the device."""
        values = torch.stack([self.scale, self.good_steps, self.overflows_left]).tolist()
        return dict(zip(("scale", "good_steps", "overflows_left"), values, strict=True))

    def restore(self, state: dict[str, float]) -> None:
        """Restores the state that ``state()`` returned; a fixed scale stays that of the experiment."""
        if self.dynamic:
            self.scale.fill_(state["scale"])
            self.good_steps.fill_(state["good_steps"])
            self.overflows_left.fill_(state["overflows_left"])


def clip_and_step(optimizer: Any, norm: Tensor, scaler: LossScaler, clip_grad: float, lr: float) -> Tensor:
    """Runs one update by a fused optimizer, which divides the gradients by the scale and what they are clipped by, and
    skips it on the device if the gradient is not finite.

    ``norm`` is the 2-norm of the scaled gradient. Returns the unscaled norm before clipping; infinity if the gradient
    is not finite.
    """
    overflow = ~torch.isfinite(norm)
    norm = (norm.double() / scaler.scale).masked_fill(overflow, math.inf)
    # 1e-6 as in torch's clip_grad_norm_ and in Megatron
    optimizer.grad_scale = (((norm + 1e-6) / (clip_grad or math.inf)).clamp(min=1.0) * scaler.scale).float()
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = overflow.float()
    optimizer.step()
    scaler.update(overflow)
    return norm
