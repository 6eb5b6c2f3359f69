"""Memory of a rank, stage by stage, term by term, against what its GPU has.

Terms come from four places: what the engine keeps of weights, gradients and optimizer (:mod:`~tridock.plan.states`),
what a step holds on top of that (:mod:`~tridock.plan.activations`), what the optimizer needs while it steps, and a
fixed overhead (:mod:`~tridock.plan.overhead`), named as such. A step holds most either in its backward passes or while
the optimizer works, never in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tridock.engines.torch.legality import shared_by_torch
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.shape import Shape, Term, total_bytes
from tridock.plan.activations import Device, activation_terms
from tridock.plan.fsdp_peak import scattered, summed_up
from tridock.plan.overhead import overhead_terms
from tridock.plan.parameters import Parameters, layers_of_stage, parameters_of_stage
from tridock.plan.states import States, states_of

Fit = Literal["fits", "tight", "no-fit"]
TIGHT: Final = 0.8
"""Share of a GPU above which a run may not last: of 454 published runs none that was estimated below it ran out
(Fujii et al., 2024, arXiv 2411.06465)."""
GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one rank of a pipeline stage."""

    stage: int
    layers: int
    parameters: Parameters
    terms: tuple[Term, ...]
    state_bytes: int
    """Weights, gradients and optimizer states: the terms that last from step to step."""
    limit_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return total_bytes(self.terms)

    @property
    def share(self) -> float | None:
        """Of the GPU's memory; None where that is not known."""
        return None if self.limit_bytes is None else self.total_bytes / self.limit_bytes

    @property
    def fit(self) -> Fit:
        """Whether a GPU holds it; one of unknown size is taken to."""
        return fit_of(self.share)


def fit_of(share: float | None) -> Fit:
    """What a share of a GPU's memory means."""
    if share is None or share <= TIGHT:
        return "fits"
    return "tight" if share <= 1.0 else "no-fit"


def memory_of_stage(experiment: Experiment, stage: int, shape: Shape, gpu: Gpu | None) -> StageMemory:
    """All terms of one rank of ``stage``; without a GPU, those of a CPU rank, which has no overhead of a GPU."""
    device: Device = "cpu" if gpu is None else "cuda"
    weights = parameters_of_stage(experiment, stage)
    states = states_of(experiment, weights, shape, device)
    terms = [*_lasting(states, weights.total), *_passing(experiment, stage, shape, states, device)]
    if gpu is not None:
        terms += overhead_terms(experiment, shape, terms, gpu.memory_bytes)
    return StageMemory(
        stage=stage,
        layers=layers_of_stage(experiment, stage),
        parameters=weights,
        terms=tuple(term for term in terms if term.bytes),
        state_bytes=states.lasting + states.passing,
        limit_bytes=None if gpu is None else gpu.memory_bytes,
    )


def _lasting(states: States, count: int) -> Iterator[Term]:
    """What the engine keeps from step to step, with its bytes a parameter: they differ (docs/planner.md)."""
    for name, value in (
        ("weights", states.weights),
        ("gradients", states.gradients),
        ("optimizer states", states.optimizer),
    ):
        yield Term(name, value, f"{value / count:.3g} bytes a parameter, kept from step to step")


def _passing(experiment: Experiment, stage: int, shape: Shape, states: States, device: Device) -> Iterator[Term]:
    """What a step takes on top: in its backward passes or, where that is more, while the optimizer works."""
    held = activation_terms(experiment, stage, shape.accumulation, device)
    yield from held
    yield Term(
        "gathered weights", states.gathered, "ZeRO 3: up to 1e9 of them at a time; FSDP2: embeddings and last norm"
    )
    yield Term("gradient bucket", states.bucket, "DeepSpeed's reduce_bucket_size, 5e8 elements")
    backward = total_bytes(held) + states.gathered + states.bucket
    accumulated = _gradients(experiment, stage, shape, states, device, total_bytes(held))
    yield Term("gradients of a step", accumulated, "from the first backward pass to the optimizer's step")
    beyond = max(0, states.passing - accumulated + states.workspace - backward)
    yield Term("optimizer's step", beyond, "its gradients and workspace, beyond the room of the above")


def _gradients(
    experiment: Experiment, stage: int, shape: Shape, states: States, device: Device, activations: int
) -> int:
    """On top of what a step's first backward pass finds. They grow as activations go, where there is a single one."""
    if shared_by_torch(experiment):
        scattering = scattered(experiment, stage, shape, device) - activations
        return round(max(summed_up(experiment, stage, shape.accumulation, device), scattering))
    return states.passing if shape.accumulation > 1 else 0


def memory_of_stages(experiment: Experiment, shape: Shape, gpu: Gpu | None) -> tuple[StageMemory, ...]:
    """Of every stage, in order."""
    stages: Sequence[int] = range(experiment.parallel.pipeline_model_parallel_size)
    return tuple(memory_of_stage(experiment, stage, shape, gpu) for stage in stages)
