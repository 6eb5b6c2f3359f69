"""A run's measurements, and the factors by which they correct a plan."""

from dataclasses import dataclass
from typing import Any, Final

from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout import Slots
from tridock.layout.traffic import Link

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run with its measurements."""

    source: str
    """The run's folder."""
    experiment: Experiment
    slots: Slots
    gpu: Gpu | None
    """None on CPUs, or if the GPU is unknown."""
    iterations: int
    """The iterations that count: the logged ones without the first."""
    step_s: float
    """Median over the iterations."""
    peak_bytes: int | None
    """Peak of torch's allocator on the GPU of any rank; None on CPUs, where only the process's memory is known."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over planned values of one run; the factors apply to plans of other layouts and clusters."""

    source: str
    gpu: Gpu | None
    iterations: int
    measured_s: float
    planned_s: float | None
    """None if the rates of the run's devices are unknown."""
    time: float
    """Factor on the time of every kernel, and of every message over ``links``. Without ``planned_s`` it applies to the
    time at 1 TFLOP/s."""
    links: tuple[Link, ...]
    """The links that the run used and whose rates were not given."""
    measured_bytes: int | None
    planned_bytes: int
    """Tensors of the rank with the highest peak."""

    @property
    def memory(self) -> float:
        """Returns the factor on the memory of tensors; 1 if it was not measured."""
        return 1.0 if self.measured_bytes is None else self.measured_bytes / self.planned_bytes

    def document(self) -> dict[str, Any]:
        """Returns the correction for ``--json``."""
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
