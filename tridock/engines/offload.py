"""ZeRO-Offload: weights and optimizer states that DeepSpeed keeps in the host's memory, and the transfers. Pure.

The bytes were counted with DeepSpeed 0.19.8 on a simulated GPU (tests/unit/train/test_on_a_gpu.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout.shape import FORMAT_BYTES, HostWork, Shape, States

OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
OFFLOAD: Final = (OPTIMIZER, PARAM)
"""Options of a DeepSpeed JSON, each a mapping."""
_KINDS: Final = {"device": ("cpu", "none"), "pin_memory": (True, False)}
_NVME: Final = "DeepSpeed 0.19.8 resumes such a run with other states, without a message"
_ADAM_BYTES: Final = 30
"""Bytes that Adam reads and writes on the host for each weight: it reads the fp32 weight, gradient and two moments
(16), writes all but the gradient (12), and writes the weight in the 16-bit format (2)."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Which states ``deepspeed.zero_optimization`` keeps in the host's memory (Ren et al., 2021, ZeRO-Offload)."""

    optimizer: bool
    parameters: bool

    @classmethod
    def of(cls, experiment: Experiment) -> Self:
        """Reads the experiment's DeepSpeed options; both are False without ``offload_*: {device: cpu}``."""
        given = experiment.deepspeed.get("zero_optimization")
        section = given if isinstance(given, Mapping) else {}
        return cls(*(_is_offloaded(section.get(path.rpartition(".")[2])) for path in OFFLOAD))

    @property
    def label(self) -> str:
        """Returns its short form for tables, after that of the ZeRO stage."""
        return f" {'o' * self.optimizer}{'p' * self.parameters}".rstrip()

    def states(self, states: States, experiment: Experiment, owned: int, steps: int) -> States:
        """Moves the offloaded bytes of ``states`` from the GPU to the host; returns the new states.

        The rank owns ``owned`` elements and accumulates over ``steps`` micro-batches. For each element the host holds
        the fp32 master weight (4 bytes), Adam's moments (8), the fp32 gradient (4), and a buffer for the weight in the
        16-bit format; in stage 2 also the gradient of earlier micro-batches.
        """
        short, stage = FORMAT_BYTES[experiment.precision], experiment.parallel.zero_stage
        if self.optimizer:
            gathering = short if stage == 2 and steps > 1 else 0
            states = replace(
                states,
                gradients=0,
                optimizer=0,
                step_gradients=states.step_gradients if stage == 1 else 0,
                workspace=0,
                startup=states.weights + short * owned,
                offloaded=12 * owned,
                host_buffers=(4 + short + gathering) * owned,
            )
        if self.parameters:
            kept = states.weights - short * owned
            offloaded = states.offloaded + short * owned
            states = replace(states, weights=kept, startup=states.startup - short * owned, offloaded=offloaded)
        return states

    def moved(self, experiment: Experiment, shape: Shape, owned: int) -> HostWork:
        """Returns the bytes that a rank with ``owned`` elements transfers in one iteration, and those of its Adam."""
        short, steps = FORMAT_BYTES[experiment.precision] * owned, shape.accumulation
        work = HostWork()
        if self.optimizer:
            # Stage 1 sends gradients once. The others add each micro-batch's gradients to the earlier ones on the GPU.
            sent = short * (1 if experiment.parallel.zero_stage == 1 else 2 * steps - 1)
            work = HostWork(_ADAM_BYTES * owned, gradients=sent, weights=short)
        if self.parameters:
            work = replace(work, weights=work.weights + 2 * steps * short)
        return work


def offload_choices(experiment: Experiment) -> Iterator[Mapping[str, object]]:
    """Yields an experiment's DeepSpeed options with the optimizer's states on the host, and in ZeRO stage 3 with the
    weights there too; nothing if it has no ZeRO stage, or offloads already."""
    stage, given = experiment.parallel.zero_stage, Offload.of(experiment)
    if stage == 0 or given.optimizer or given.parameters:
        return
    for paths in OFFLOAD[:1], *([OFFLOAD] if stage == 3 else []):
        section = experiment.deepspeed.get("zero_optimization", {})
        offloaded = {path.rpartition(".")[2]: {"device": "cpu"} for path in paths}
        yield {"deepspeed": {**experiment.deepspeed, "zero_optimization": {**section, **offloaded}}}


def offload_problems(experiment: Experiment, path: str, value: object) -> Iterator[Problem]:
    """Yields the problems of ``value``, given at the option ``path``, one of :data:`OFFLOAD`."""
    where, stage = f"deepspeed.{path}", experiment.parallel.zero_stage
    if not isinstance(value, Mapping):
        yield Problem(where, "must be a mapping", repr(value), "write {device: cpu}")
        return
    for name, given in value.items():
        if name == "device" and given == "nvme":
            yield Problem(f"{where}.device", _NVME, "nvme", "set it to cpu", ("cpu",))
        elif name not in _KINDS:
            yield Problem(f"{where}.{name}", "does not reach DeepSpeed", str(given), "leave it out")
        elif not any(given is choice or (given == choice and isinstance(given, str)) for choice in _KINDS[name]):
            choices = "cpu or none" if name == "device" else "true or false"
            yield Problem(f"{where}.{name}", f"must be {choices}", repr(given), "write one")
    if not _is_offloaded(value):
        return
    if path == PARAM and stage != 3:
        yield Problem(
            where, "needs ZeRO stage 3", f"parallel.zero_stage {stage}", "set it to 3, or leave this out", (3,)
        )
    elif stage == 0:
        todo = "set it to 1, 2 or 3, or leave this out"
        yield Problem(where, "needs a ZeRO stage from 1 to 3", "parallel.zero_stage 0", todo, (1, 2, 3))


def _is_offloaded(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("device", "none") != "none"
