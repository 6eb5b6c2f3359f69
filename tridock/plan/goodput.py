"""The share of its time in which a run makes progress, with nodes that fail and checkpoints that take time.

Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006): failures come at random, M
seconds apart on average; a run computes for an interval, pauses to save, and after a failure restarts from the last
checkpoint. A checkpoint that is written in the background pauses the run only for its copy, but a failure before it is
complete costs the time of its writing too, and the next one has to wait for it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tridock.engines import engine_of
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.shape import Shape

GB: Final = 1e9
RESTART_S: Final = 51.0
"""Assumed: from a failure to the next step, without the reading of the checkpoint. The longest that was measured with
CPU ranks, of a node that a spare replaced (docs/results.md); GPU ranks also start CUDA and NCCL."""
PCIE_3_GB_S: Final = 11.0
"""From a GPU that is not known to page-locked memory of its host (:mod:`tridock.gpus`)."""


@dataclass(frozen=True, slots=True)
class Failures:
    """What is assumed of the cluster and its storage."""

    node_mtbf_hours: float
    checkpoint_gb_s: float
    """What the storage takes from all ranks together, and gives to them."""
    restart_s: float = RESTART_S


@dataclass(frozen=True, slots=True)
class Interval:
    """Between two checkpoints."""

    iterations: int
    seconds: float
    goodput: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of a run; seconds unless a name says otherwise."""

    failures: Failures
    mtbf_hours: float
    """Of the cluster: that of a node, divided by their number."""
    writing: float
    """A checkpoint, from its copy to its completion."""
    pause: float
    """For which training stands still."""
    lost: float
    """For each failure, beside what was computed since the last checkpoint: the restart, and the reading."""
    own: Interval | None
    """That of the experiment; None where it saves only at its end."""
    best: Interval

    @property
    def used(self) -> Interval:
        """The experiment's, or the best one where it has none."""
        return self.own or self.best

    def document(self) -> dict[str, Any]:
        """For ``--json``."""

        def shown(interval: Interval | None) -> Mapping[str, float] | None:
            if interval is None:
                return None
            return {name: getattr(interval, name) for name in ("iterations", "seconds", "goodput")}

        return {
            "node_mtbf_hours": self.failures.node_mtbf_hours,
            "mtbf_hours": self.mtbf_hours,
            "checkpoint_gb_s": self.failures.checkpoint_gb_s,
            "checkpoint_seconds": self.writing,
            "pause_seconds": self.pause,
            "restart_seconds": self.failures.restart_s,
            "save_interval": shown(self.own),
            "best_save_interval": shown(self.best),
        }


def goodput_of(
    experiment: Experiment, shape: Shape, step: float, nodes: int, failures: Failures, gpu: Gpu | None = None
) -> Goodput:
    """Of a run on so many nodes, each iteration of which takes ``step`` seconds."""
    train, mtbf = experiment.train, failures.node_mtbf_hours * 3600 / nodes
    writing = engine_of(experiment).checkpoint_bytes(experiment) / (failures.checkpoint_gb_s * GB)
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


def _copied_bytes(experiment: Experiment, shape: Shape) -> int:
    """By the rank that copies most to its host."""
    engine = engine_of(experiment)
    stages = range(experiment.parallel.pipeline_model_parallel_size)
    weights = [engine.parameters(experiment, stage) for stage in stages]
    return max(engine.copied_bytes(experiment, it, engine.states(experiment, it, shape, "cuda")) for it in weights)


def best_interval(pause: float, mtbf: float) -> float:
    """Seconds of computation between two checkpoints that lose the least time: Daly's equation 37, whose first term is
    Young's (1974)."""
    if pause >= 2 * mtbf:
        return mtbf
    ratio = pause / (2 * mtbf)
    return math.sqrt(2 * pause * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause


def goodput(interval: float, pause: float, lost: float, mtbf: float) -> float:
    """Computation over time: Daly's equation 20. ``lost``: for each failure; another one may come during it."""
    if max(lost, interval + pause) > 700 * mtbf:  # e to this power has no number
        return 0.0
    return interval / (mtbf * math.exp(lost / mtbf) * math.expm1((interval + pause) / mtbf))
