"""megatron-core's timers, as it calls them, in the place of Megatron-LM's: they tell a run's phases."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from tridock.train.rank.phases import BACKWARD, FORWARD, SYNC, Phases

_PHASES: Final = {
    "forward-compute": FORWARD,
    "backward-compute": BACKWARD,
    "all-grads-sync": SYNC,
    "embedding-grads-all-reduce": SYNC,
    "non-tensor-parallel-grads-all-reduce": SYNC,
}


class Timers:
    """``config.timers``: called with a timer's name, it gives that."""

    def __init__(self, phases: Phases) -> None:
        self._timers = {name: Timer(phases, phase) for name, phase in _PHASES.items()}
        self._none = Timer(phases, None)

    def __call__(self, name: str, log_level: int | None = None) -> Timer:  # noqa: ARG002  all that are known are taken
        return self._timers.get(name, self._none)


class Timer:
    """One of them; those that are no phase's do nothing."""

    def __init__(self, phases: Phases, phase: str | None) -> None:
        self._phases, self._phase = phases, phase
        self._inside: AbstractContextManager[None] | None = None

    def start(self, barrier: bool = False) -> None:  # noqa: ARG002  nobody waits for being timed
        if self._phase is not None:
            self._inside = self._phases.inside(self._phase)
            self._inside.__enter__()

    def stop(self, barrier: bool = False) -> None:  # noqa: ARG002
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None
