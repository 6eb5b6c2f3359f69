"""fp16 loss scaling for strategy ddp, with the rules of DeepSpeed's and Megatron's dynamic scaler.

torch's GradScaler has no hysteresis, and an experiment must behave the same under every strategy.
"""

from __future__ import annotations

from typing import Final

from tridock.experiment.schema import LossScale, Precision

_SMALLEST: Final = 1.0


class LossScaler:
    """``scale`` multiplies the loss; ``update(overflow)`` after every step adapts it.

    Fixed where ``loss_scale`` is set (or the precision is not fp16: then 1). Dynamic otherwise: it starts at
    2 ** initial_scale_power, halves after ``hysteresis`` overflows, and doubles after ``loss_scale_window`` good steps.
    """

    def __init__(self, settings: LossScale, precision: Precision) -> None:
        self.settings = settings
        self.dynamic = precision == "fp16" and settings.loss_scale == 0.0
        self.scale = 1.0
        if precision == "fp16":
            self.scale = settings.loss_scale or 2.0**settings.initial_scale_power
        self.good_steps = 0
        self.overflows_left = settings.hysteresis

    def update(self, overflow: bool) -> None:
        """Adapts the scale to the outcome of a step."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.overflows_left = 1
                self.scale = max(self.scale / 2.0, _SMALLEST)
            return
        # As DeepSpeed counts: the good step that comes after a whole window of them doubles.
        if self.good_steps and self.good_steps % self.settings.loss_scale_window == 0:
            self.scale *= 2.0
            self.overflows_left = self.settings.hysteresis
        self.good_steps += 1

    def state(self) -> dict[str, float]:
        """The state to save in a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows_left": self.overflows_left}

    def restore(self, state: dict[str, float]) -> None:
        """Continues from ``state()``; a fixed scale stays the experiment's."""
        if self.dynamic:
            self.scale = state["scale"]
            self.good_steps, self.overflows_left = int(state["good_steps"]), int(state["overflows_left"])
