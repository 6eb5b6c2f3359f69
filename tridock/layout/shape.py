"""The shape of a layout and of one pipeline stage, and the terms of a rank's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from tridock.experiment import Experiment

Device = Literal["cpu", "cuda"]
FORMAT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layout on nodes that all have as many slots."""

    data: int
    """Replicas of the model."""
    accumulation: int
    """Micro batches of an iteration, of each replica."""
    slots: int
    """Of one node."""


@dataclass(frozen=True, slots=True)
class Term:
    """Something that a rank holds: its name, its bytes, and where the formula comes from."""

    name: str
    bytes: int
    source: str


def total_bytes(terms: Iterable[Term]) -> int:
    """The sum."""
    return sum(term.bytes for term in terms)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank's weights, gradients and optimizer."""

    weights: int
    gradients: int
    """Kept between steps; the engine's buffers for them."""
    optimizer: int
    passing: int = 0
    """Gradients that come with the first backward pass of a step and go with its end."""
    bucket: int = 0
    """What gradients are reduced through, during the backward passes."""
    gathered: int = 0
    """Weights that are there whole for a while."""
    workspace: int = 0
    """While the optimizer steps, when the activations are gone."""

    @property
    def lasting(self) -> int:
        return self.weights + self.gradients + self.optimizer


def layers_of_stage(experiment: Experiment, stage: int) -> int:
    """Layers of one stage, all its runs of an interleaved pipeline together.

    Where the stages cannot hold the same number, the first ones have one more
    (DeepSpeed's ``partition_method="type:transformer"``, and engine torch).
    """
    each, rest = divmod(experiment.model.num_layers, experiment.parallel.pipeline_model_parallel_size)
    return each + (1 if stage < rest else 0)


def recomputed_layers(experiment: Experiment, layers: int) -> int:
    """How many of a stage's layers the backward pass computes again, whole."""
    model = experiment.model
    if model.checkpoint_activations:
        return layers
    if model.recompute_granularity != "full":
        return 0
    if model.recompute_method == "block":
        runs = experiment.parallel.virtual_pipeline_model_parallel_size
        return min(layers, (model.recompute_num_layers or 0) * runs)
    return layers


def in_flight(experiment: Experiment, stage: int, accumulation: int) -> int:
    """Runs of a stage's layers whose backward pass is still to come, at most.

    GPipe: all. 1F1B: as many as there are stages from here to the last (Narayanan et al., 2021, section 2.2).
    Interleaved: Megatron's warm-up of 2 (p - stage - 1) + (v - 1) p runs, and one.
    """
    parallel = experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if stages == 1:
        return 1
    if parallel.pipeline_schedule == "gpipe":
        return accumulation
    if virtual == 1:
        return min(stages - stage, accumulation)
    return min(2 * (stages - stage - 1) + (virtual - 1) * stages + 1, accumulation * virtual)


def tokens_of(experiment: Experiment) -> int:
    """Tokens of one micro batch on one context parallel rank."""
    share = experiment.model.seq_length // experiment.parallel.context_parallel_size
    return share * experiment.batch.micro_batch_size


def hidden_bytes(experiment: Experiment) -> int:
    """One micro batch of hidden states on one context parallel rank, [seq_length / cp, micro batch, hidden]."""
    return tokens_of(experiment) * experiment.model.hidden_size * FORMAT_BYTES[experiment.precision]
