"""Measures a step by phase, without synchronization: by wall clock on a CPU, by events in the stream on a GPU.

Every moment belongs to one phase, the innermost one, so the phases of a step add up to its time. On a GPU a phase is
the device's time between two events, including idle time. Each change of phase, of which a micro-batch has several, is
progress to the supervisor.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

import torch

from tridock.contracts import heartbeat

DATA: Final = "data"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
SYNC: Final = "gradient_sync"
WAIT: Final = "pipeline_wait"
"""Time in which pipeline stages send, receive, or wait for each other."""
OPTIMIZER: Final = "optimizer"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"
OTHER: Final = "other"

P = ParamSpec("P")
R = TypeVar("R")


class Phases:
    """Charges the time of a rank to phases, by name."""

    def __init__(self, device: torch.device) -> None:
        self._stack = [OTHER]
        self._on_gpu = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()
        # On a GPU: events, and the phase that each ends.
        self._marks: deque[tuple[torch.cuda.Event, str]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._before: torch.cuda.Event | None = None

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Charges the enclosed time to this phase, except for nested phases. An evaluation ignores nested phases."""
        heartbeat.touch()
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
        """Wraps a function so that each call runs inside a phase."""

        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.inside(name):
                return function(*args, **kwargs)

        return inside

    def sync_follows(self, parameters: Sequence[torch.Tensor]) -> None:
        """Charges the rest of a backward pass to ``gradient_sync`` once these parameters have their gradients.

        DDP exchanges earlier buckets meanwhile; these are the model's first parameters, whose gradients come last.
        """

        def has_gradient(_: torch.Tensor) -> None:
            if self._stack[-1] in (BACKWARD, SYNC):
                self._charge(BACKWARD)  # the time up to this gradient is still backward
                self._stack[-1] = SYNC

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(has_gradient)

    def _charge(self, name: str) -> None:
        """Charges the time since the last charge to this phase."""
        if self._on_gpu:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((event, name))
        else:
            now = time.perf_counter()
            self._seconds[name] += now - self._since
            self._since = now

    def read(self) -> dict[str, float]:
        """Returns seconds by phase since the last call. Events that a GPU has not reached count in the next call."""
        self._charge(self._stack[-1])
        while self._marks and self._marks[0][0].query():
            event, name = self._marks.popleft()
            if self._before is not None:
                self._seconds[name] += self._before.elapsed_time(event) / 1000
                self._spare.append(self._before)
            self._before = event
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)


def step_seconds(seconds: dict[str, float], steps: int) -> dict[str, float]:
    """Returns the seconds per step, from those of ``steps`` steps. Leaves out evaluations and checkpoints, which have
    events of their own."""
    own = {name: spent for name, spent in seconds.items() if name not in (EVALUATION, CHECKPOINT)}
    return {name: round(spent / steps, 7) for name, spent in own.items()}
