"""Where the time of a step goes, by phase: wall clocks on a CPU, events in the GPU's own stream, nothing waited for.

Every moment belongs to one phase, the innermost that was entered, so the phases of a step add up to it. On a GPU they
are the device's time from one event to the next, idle time in it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

import torch
from torch import nn

DATA: Final = "data"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
SYNC: Final = "gradient_sync"
WAIT: Final = "pipeline_wait"
"""Stages sending and receiving, and waiting for each other."""
OPTIMIZER: Final = "optimizer"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"
OTHER: Final = "other"

P = ParamSpec("P")
R = TypeVar("R")


class Phases:
    """Of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._stack = [OTHER]
        self._on_gpu = device.type == "cuda"
        self._seconds: Counter[str] = Counter()
        self._since = time.perf_counter()
        # On a GPU: events, and the phase that each ends.
        self._marks: deque[tuple[torch.cuda.Event, str]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._before: torch.cuda.Event | None = None

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """What happens inside is of this phase, but for what other phases inside it take; an evaluation is whole."""
        if self._stack[-1] == EVALUATION:
            yield
            return
        self._charge(self._stack[-1])
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge(self._stack.pop())

    def around(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, each call inside a phase."""

        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.inside(name):
                return function(*args, **kwargs)

        return inside

    def sync_follows(self, parameters: list[nn.Parameter]) -> None:
        """The rest of a backward pass is ``gradient_sync`` once all of these have their gradients: the model's first,
        which are the last to get theirs. For DDP, whose ranks exchange the others' gradients meanwhile."""

        def has_gradient(_: torch.Tensor) -> None:
            if self._stack[-1] in (BACKWARD, SYNC):
                self._charge(BACKWARD)  # what has passed since the one before was still that
                self._stack[-1] = SYNC

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(has_gradient)

    def _charge(self, name: str) -> None:
        """The time since the last charge was this phase's."""
        if self._on_gpu:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((event, name))
        else:
            now = time.perf_counter()
            self._seconds[name] += now - self._since
            self._since = now

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last reading; what a GPU has not come to yet is left for the next."""
        self._charge(self._stack[-1])
        while self._marks and self._marks[0][0].query():
            event, name = self._marks.popleft()
            if self._before is not None:
                self._seconds[name] += self._before.elapsed_time(event) / 1000
                self._spare.append(self._before)
            self._before = event
        seconds, self._seconds = self._seconds, Counter()
        return dict(seconds)


def of_a_step(seconds: dict[str, float], steps: int) -> dict[str, float]:
    """Seconds of one step out of those of ``steps``; evaluations and checkpoints are told of where they are made."""
    own = {name: spent for name, spent in seconds.items() if name not in (EVALUATION, CHECKPOINT)}
    return {name: round(spent / steps, 7) for name, spent in own.items()}
