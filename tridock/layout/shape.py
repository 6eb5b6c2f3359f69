"""The shape of a layout and of one pipeline stage, the weights of its ranks, and the terms of their memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from tridock.experiment import Experiment, resnet
from tridock.experiment.model import Model
from tridock.experiment.weights import layer_weights, mlp_weights, norm_vectors, position_rows

Device = Literal["cpu", "cuda"]
FORMAT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
GPT2_TOKENS: Final = 50257
"""The vocabulary that is assumed where the experiment leaves it to its data."""


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
    """At most."""
    source: str
    least: int | None = None
    """At least; the same where left out."""


def total_bytes(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


def least_bytes(terms: Iterable[Term]) -> int:
    return sum(term.bytes if term.least is None else term.least for term in terms)


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
    startup: int = 0
    """The most that the rank holds before its first step, while weights, gradients and optimizer come to be."""
    offloaded: int = 0
    """Weights and optimizer states that the host's memory has instead."""
    host_buffers: int = 0
    """What else the host's memory has for them."""

    @property
    def lasting(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def saved(self) -> int:
        """Weights and optimizer states, wherever they are: what a checkpoint holds."""
        return self.weights + self.optimizer + self.offloaded


@dataclass(frozen=True, slots=True)
class HostWork:
    """Bytes of one rank in an iteration, of states that its host keeps."""

    updated: int = 0
    """Read and written in the host's memory by the optimizer."""
    gradients: int = 0
    """Between GPU and host, during the backward passes."""
    weights: int = 0
    """Between host and GPU, before the GPU can compute with them."""


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


@dataclass(frozen=True, slots=True)
class Parameters:
    """Weights of one rank, by what they are for."""

    layers: int
    embedding: int
    """The token table, this rank's rows."""
    positions: int
    final_norm: int
    head: int
    """An output layer of its own, or the copy of the tied tables that the last stage of a pipeline holds."""
    experts: int = 0
    """Those of a mixture of experts, beside ``layers``."""

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.embedding + self.positions + self.final_norm + self.head


def vocab_size(experiment: Experiment) -> int:
    """Tokens of the tokenizer; GPT-2's where the experiment does not say."""
    return experiment.model.vocab_size or GPT2_TOKENS


def layer_parameters(experiment: Experiment) -> int:
    """Of one layer on one tensor parallel rank, without experts; of a model of images, of its largest block."""
    if experiment.model.is_vision:
        return resnet.largest_block(experiment.model)
    return _layer_share(experiment.model, experiment.parallel.tensor_model_parallel_size)


@lru_cache(maxsize=256)
def _layer_share(model: Model, tensor: int) -> int:
    return sum(weight.share(tensor) for weight in layer_weights(model))


def expert_parameters(experiment: Experiment) -> int:
    """Of one layer's experts on one rank."""
    model, parallel = experiment.model, experiment.parallel
    if not model.num_moe_experts:
        return 0
    each = sum(weight.share(parallel.expert_tensor_size) for weight in mlp_weights(model))
    return model.num_moe_experts // parallel.expert_model_parallel_size * each


def parameters_of_stage(experiment: Experiment, stage: int, rows: int, *, copies_positions: bool = False) -> Parameters:
    """Of each rank of a stage, whatever its place in the tensor, context and data parallel groups.

    ``rows``: of the token table, over all tensor parallel ranks. ``copies_positions``: the last stage of a pipeline
    holds a copy of the position table too.
    """
    model, stages = experiment.model, experiment.parallel.pipeline_model_parallel_size
    if model.is_vision:
        head = resnet.head_parameters(model)
        return Parameters(resnet.parameters(model) - head, 0, 0, 0, head)
    width = model.hidden_size
    # Where the rows do not divide evenly, the first rank has the most.
    rows = -(-rows // experiment.parallel.tensor_model_parallel_size)
    table, positions = rows * width, position_rows(model) * width
    first, last = stage == 0, stage == stages - 1
    has_head = last and (not first or model.untie_embeddings_and_output_weights)
    return Parameters(
        layers=layers_of_stage(experiment, stage) * layer_parameters(experiment),
        embedding=table if first else 0,
        positions=positions if first else 0,
        final_norm=norm_vectors(model) * width if last else 0,
        head=table + (positions if copies_positions else 0) if has_head else 0,
        experts=layers_of_stage(experiment, stage) * expert_parameters(experiment),
    )
