"""Goodput: the share of time in which a run makes progress, given node failures and the cost of checkpoints.

Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006): failures come at random, M
seconds apart on average; a run computes for an interval, pauses to save, and after a failure restarts from the last
checkpoint. A checkpoint written in the background pauses the run only for its copy. A failure before the checkpoint is
complete also costs the time of its writing, and the next checkpoint has to wait for it.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from tridock.engines import cost_model_of
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.shape import LayoutShape

GB: Final = 1e9
RESTART_S: Final = 51.0
"""Assumed time from a failure to the next step, without reading the checkpoint. It is the longest measured with CPU
ranks, when a spare replaced a node (docs/results.md); GPU ranks also start CUDA and NCCL."""
PCIE_3_GB_S: Final = 11.0
"""Rate from an unknown GPU to its host's page-locked memory (:mod:`tridock.gpus`)."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Assumptions about the cluster and its storage."""

    node_mtbf_hours: float
    checkpoint_gb_s: float
    """Rate at which all ranks together write to, and read from, the storage."""
    restart_s: float = RESTART_S


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two checkpoints, and its goodput."""

    iterations: int
    seconds: float
    goodput: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput of a run; seconds unless a name says otherwise."""

    failures: Failures
    mtbf_hours: float
    """MTBF of the cluster: that of a node divided by the number of nodes."""
    writing: float
    """Time of a checkpoint, from its copy to its completion."""
    pause: float
    """Time for which a checkpoint pauses training."""
    lost: float
    """Time that each failure costs besides the computation since the last checkpoint: restart and reading."""
    own: Interval | None
    """The experiment's interval; None if it saves only at its end."""
    best: Interval

    @property
    def used(self) -> Interval:
        """Returns the experiment's interval, or the best one if it has none."""
        return self.own or self.best

    def document(self) -> dict[str, Any]:
        """Returns the goodput for ``--json``."""
        return {
            "node_mtbf_hours": self.failures.node_mtbf_hours,
            "mtbf_hours": self.mtbf_hours,
            "checkpoint_gb_s": self.failures.checkpoint_gb_s,
            "checkpoint_seconds": self.writing,
            "pause_seconds": self.pause,
            "restart_seconds": self.failures.restart_s,
            "save_interval": None if self.own is None else asdict(self.own),
            "best_save_interval": asdict(self.best),
        }


def goodput_of(
    experiment: Experiment, shape: LayoutShape, step: float, nodes: int, failures: Failures, gpu: Gpu | None = None
) -> Goodput:
    """Returns the goodput of a run on a number of nodes. ``step``: seconds of one iteration."""
    train, mtbf = experiment.train, failures.node_mtbf_hours * 3600 / nodes
    writing = cost_model_of(experiment).checkpoint_bytes(experiment) / (failures.checkpoint_gb_s * GB)
    copying = PCIE_3_GB_S if gpu is None else gpu.kernels.host_gb_s
    pause = min(writing, _copied_bytes(experiment, shape) / (copying * GB)) if train.async_save else writing
    lost = failures.restart_s + writing + (writing - pause)

    def interval(iterations: int) -> Interval:
        seconds = iterations * step
        waits = max(pause, writing - seconds)
        return Interval(iterations, seconds, goodput(seconds, waits, lost, mtbf))

    best = max(1, math.ceil(writing / step), round(best_interval(pause, mtbf) / step))
    own = interval(train.save_interval) if train.save and train.save_interval else None
    return Goodput(failures, mtbf / 3600, writing, pause, lost, own, interval(best))


def _copied_bytes(experiment: Experiment, shape: LayoutShape) -> int:
    """Returns the bytes of the rank that copies the most to its host."""
    model = cost_model_of(experiment)
    stages = range(experiment.parallel.pipeline_model_parallel_size)
    weights = [model.parameters(experiment, stage) for stage in stages]
    return max(model.copied_bytes(experiment, it, model.states(experiment, it, shape, "cuda")) for it in weights)


def best_interval(pause: float, mtbf: float) -> float:
    """Returns the seconds of computation between two checkpoints that lose the least time: Daly's equation 37, whose
    first term is Young's (1974)."""
    if pause >= 2 * mtbf:
        return mtbf
    ratio = pause / (2 * mtbf)
    return math.sqrt(2 * pause * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause


def goodput(interval: float, pause: float, lost: float, mtbf: float) -> float:
    """Returns computation over total time: Daly's equation 20. ``lost``: for a failure, which another may interrupt."""
    if max(lost, interval + pause) > 700 * mtbf:  # the exponential would overflow
        return 0.0
    return interval / (mtbf * math.exp(lost / mtbf) * math.expm1((interval + pause) / mtbf))
