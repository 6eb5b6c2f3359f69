"""Whether a training is healthy: losses and gradients that are finite, and steps that update the parameters.

Every step only hands over its loss and its gradient norm, on the device. They are looked at when the run logs or saves:
that alone waits for the device and the other ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from tridock.contracts.checkpoint_files import Illness, Quantity
from tridock.contracts.events import Cause
from tridock.errors import Problem
from tridock.experiment.schema import Experiment

IDLE_STEPS: Final = 50
"""So many steps in a row, skipped at a loss scale that cannot fall, end a run; so many of a resumed run without any
update make it a failure."""
SMALLEST_SCALE: Final = 1.0
"""Every engine's dynamic loss scale falls no further."""
_FOLDED: Final = 64


@dataclass(frozen=True, slots=True)
class Seen:
    """What the steps of an attempt have shown, up to ``iteration``; the same on all ranks."""

    iteration: int
    finite_until: int
    """The last iteration whose loss was finite on every rank."""
    ill_gradient: int | None
    """The first iteration that applied a gradient which was not finite."""
    updates: int
    """Steps with a finite gradient above 0."""
    skipped: int
    """Steps that were skipped because the gradient was not finite."""
    zeros: int
    """Steps with a gradient of 0."""
    taken_until: int
    """The last iteration whose step was not skipped."""

    @property
    def ill(self) -> Illness | None:
        """Why no training continues from the weights after ``iteration``; None if nothing speaks against them.

        A step without an update leaves the weights as they were, so an earlier loss that was not finite does not count.
        """
        found = []
        if self.finite_until < self.iteration:
            found.append(Illness(Quantity.LOSS, self.finite_until + 1))
        if self.ill_gradient is not None:
            found.append(Illness(Quantity.GRADIENT, self.ill_gradient))
        return min(found, key=lambda it: it.iteration, default=None)

    def condemns(self, saved: int | None) -> bool:
        """Whether the weights after iteration ``saved``, whose own loss was finite, yield no finite loss."""
        return saved == self.finite_until < self.iteration


class Health:
    """Watches the steps of one attempt, which continues from iteration ``start``.

    ``updates_before``: the steps before that updated the parameters; None if the checkpoint does not say. ``wider``:
    the engine's precisions with a wider range than fp16, for advice.
    """

    def __init__(
        self,
        experiment: Experiment,
        start: int,
        updates_before: int | None,
        device: torch.device,
        wider: str = "bf16 or fp32",
    ) -> None:
        self._experiment, self._start, self._before = experiment, start, updates_before
        self._device, self._wider = device, wider
        self._steps: list[tuple[Tensor, Tensor | float]] = []
        self._iteration = start
        self._state = torch.tensor([start, -math.inf, 0, 0, 0, start], dtype=torch.float64).to(device)
        self._fixed_since: int | None = None

    def add(self, loss: Tensor, grad_norm: Tensor | float) -> None:
        """Takes a step's loss on this rank, and its gradient norm: infinite if it was skipped. Waits for nothing."""
        self._steps.append((loss.detach(), grad_norm))
        self._iteration += 1
        if len(self._steps) == _FOLDED:
            self._fold()

    def _fold(self) -> None:
        """Counts the steps at hand, on the device. Every entry of the state rises, or becomes worse, or stays."""
        if not self._steps:
            return
        losses = torch.stack([loss.double() for loss, _ in self._steps])
        norms = torch.stack([self._on_device(norm) for _, norm in self._steps])
        first = self._iteration - len(self._steps) + 1
        numbers = torch.arange(first, self._iteration + 1, dtype=torch.float64, device=self._device)
        ill, skipped = norms.isnan() | (norms < 0), norms == math.inf
        finite, taken = (numbers.masked_fill(~it, -math.inf).max() for it in (losses.isfinite(), ~skipped))
        applied = (-numbers).masked_fill(~ill, -math.inf).max()  # of the first iteration, the largest negative
        counts = [it.sum().double() for it in ((norms > 0) & norms.isfinite(), skipped, norms == 0)]
        old = self._state.unbind()
        self._state = torch.stack(
            [
                torch.maximum(old[0], finite),
                torch.maximum(old[1], applied),
                *(before + more for before, more in zip(old[2:5], counts, strict=True)),
                torch.maximum(old[5], taken),
            ]
        )
        self._steps.clear()

    def _on_device(self, norm: Tensor | float) -> Tensor:
        if isinstance(norm, Tensor):
            return norm.detach().to(self._device, torch.float64).reshape(())
        return torch.full((), norm, dtype=torch.float64, device=self._device)

    def look(self) -> Seen:
        """Returns what the steps have shown. A collective of 48 bytes, which waits for the device."""
        self._fold()
        signs = self._state.new_tensor(_SIGNS)
        worst = self._state * signs
        dist.all_reduce(worst, op=dist.ReduceOp.MIN)
        finite, applied, updates, skipped, zeros, taken = (worst * signs).tolist()
        return Seen(
            iteration=self._iteration,
            finite_until=int(finite),
            ill_gradient=None if math.isinf(applied) else int(-applied),
            updates=int(updates),
            skipped=int(skipped),
            zeros=int(zeros),
            taken_until=int(taken),
        )

    def updates(self, seen: Seen) -> int | None:
        """Returns the run's steps that updated the parameters, for its next attempt."""
        return None if self._before is None else self._before + seen.updates

    def idleness(self, seen: Seen, loss_scale: float) -> Problem | None:
        """Returns why the run ends because it trains nothing. Call it whenever the run logs, on every rank."""
        train, fp16 = self._experiment.train, self._experiment.fp16
        is_fixed = self._experiment.precision == "fp16" and (fp16.loss_scale > 0 or loss_scale <= SMALLEST_SCALE)
        if not is_fixed:
            self._fixed_since = None
        elif self._fixed_since is None:
            self._fixed_since = self._start if fp16.loss_scale > 0 else seen.iteration
        if self._fixed_since is not None:
            row = seen.iteration - max(self._fixed_since, seen.taken_until)
            if row >= IDLE_STEPS:
                return self._skips(f"the last {row} steps were all skipped", seen, loss_scale)
        steps = seen.iteration - self._start
        counts = self._before == 0 or steps >= IDLE_STEPS
        if seen.iteration < train.train_iters or not counts or seen.updates:
            return None
        every = f"every one of its {steps} steps"
        if seen.skipped == steps:
            return self._skips(f"{every} was skipped", seen, loss_scale)
        parts = {"skipped": seen.skipped, "with a gradient of 0": seen.zeros}
        parts["with a gradient that is not finite"] = steps - seen.skipped - seen.zeros - seen.updates
        kinds = ", ".join(f"{count} were {kind}" for kind, count in parts.items() if count)
        what, todo = f"of its {steps} steps {kinds}", "check the data: labels, or masks that leave nothing to learn"
        if seen.zeros == steps:
            what = f"{every} had a gradient of 0"
        return _problem(seen, f"no parameter was updated: {what}", "", todo)

    def _skips(self, what: str, seen: Seen, loss_scale: float) -> Problem:
        if self._experiment.precision != "fp16":
            todo = "lower optimizer.lr, or check the data"
            return _problem(seen, f"no parameter was updated: {what}, because the gradient is not finite", "", todo)
        todo = f"lower fp16.initial_scale_power, train longer, or use {self._wider}"
        if self._experiment.fp16.loss_scale > 0:
            todo = f"lower fp16.loss_scale, set it to 0 for a dynamic one, or use {self._wider}"
        elif loss_scale <= SMALLEST_SCALE:
            todo = f"lower optimizer.lr, or use {self._wider}"
        what = f"no parameter was updated: {what}, because the gradient overflowed in fp16"
        return _problem(seen, what, f"a loss scale of {loss_scale:g}", todo)


_SIGNS: Final = (1.0, -1.0, 1.0, -1.0, -1.0, 1.0)
"""Of each entry of the state: whether the smallest value of the ranks is the worst, or the largest."""


def _problem(seen: Seen, what: str, got: str, todo: str) -> Problem:
    return Problem(f"iteration {seen.iteration}", what, got, todo, cause=Cause.NOTHING_TRAINED)
