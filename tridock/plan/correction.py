"""What a run measured, and the factors by which it corrects a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.traffic import Link

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run with its measurements."""

    source: str
    """Its folder."""
    experiment: Experiment
    slots: Mapping[str, Sequence[int]]
    """Node to slot numbers, in the order of the ranks."""
    gpu: Gpu | None
    """None on CPUs, or where nobody named it."""
    iterations: int
    """That count: the logged ones without the first."""
    step_s: float
    """Median over them."""
    peak_bytes: int | None
    """The most that torch allocated on the GPU of any rank; None on CPUs, where only the process's memory is known."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over planned, of one run; the plan of another layout or cluster takes the factors over."""

    source: str
    gpu: Gpu | None
    iterations: int
    measured_s: float
    planned_s: float | None
    """None where the plan knows no rates of the run's devices."""
    time: float
    """Factor on the time of every kernel, and of every message over ``links``. Without ``planned_s``: of those that
    1 TFLOP/s gives."""
    links: tuple[Link, ...]
    """Those that the run used, whose rates were not given."""
    measured_bytes: int | None
    planned_bytes: int
    """Tensors of the fullest rank."""

    @property
    def memory(self) -> float:
        """Factor on what tensors take; 1 where it was not measured."""
        return 1.0 if self.measured_bytes is None else self.measured_bytes / self.planned_bytes

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        measured = self.measured_bytes
        return {
            "run": self.source,
            "gpu": None if self.gpu is None else self.gpu.name,
            "iterations": self.iterations,
            "seconds": {"planned": self.planned_s, "measured": self.measured_s, "factor": self.time},
            "links": list(self.links),
            "memory": None
            if measured is None
            else {
                "planned_gib": round(self.planned_bytes / _GIB, 4),
                "measured_gib": round(measured / _GIB, 4),
                "factor": self.memory,
            },
        }
