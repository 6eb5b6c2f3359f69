"""The shape of a layout and of one pipeline stage, the weights of its ranks, and the terms of their memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from tridock.experiment import Experiment, resnet
from tridock.experiment.model import Model
from tridock.experiment.parameters import layer_weights, mlp_weights, norm_vectors, position_rows

Device = Literal["cpu", "cuda"]
FORMAT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
GPT2_TOKENS: Final = 50257
"""The vocabulary size that the plan assumes if the experiment leaves it to its data."""


@dataclass(frozen=True, slots=True)
class LayoutShape:
    """Sizes of a layout on nodes with equally many slots."""

    data: int
    """Replicas of the model."""
    accumulation: int
    """Micro batches of one replica in an iteration."""
    slots: int
    """Ranks that are connected without the network: the slots of one node, or of several in one NVLink domain."""
    has_multicast: bool = False
    """Whether one write of a GPU reaches all others of its node."""
    nodes: int = 1
    """Nodes that have ``slots`` together."""


OVERLAP: Final = "tp_comm_overlap"
"""The term of buffers through which tensor parallel ranks exchange parts of a matrix: not memory of torch."""


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a rank's memory: its name, its bytes, and the source of the formula."""

    name: str
    bytes: int
    """Upper bound."""
    source: str
    least: int | None = None
    """Lower bound; None: the same as ``bytes``."""


def total_bytes(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


def least_bytes(terms: Iterable[Term]) -> int:
    return sum(term.bytes if term.least is None else term.least for term in terms)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank's weights, gradients and optimizer states."""

    weights: int
    gradients: int
    """Gradients kept between steps, in the engine's buffers."""
    optimizer: int
    step_gradients: int = 0
    """Gradients that the first backward pass of a step allocates and the end of the step frees."""
    bucket: int = 0
    """Buckets through which the backward passes reduce gradients."""
    gathered: int = 0
    """Weights that are gathered for a part of the step."""
    workspace: int = 0
    """Temporary buffers of the end of the backward passes or of the optimizer step, when the activations are freed."""
    startup: int = 0
    """The rank's peak before its first step, while weights, gradients and optimizer states are created."""
    offloaded: int = 0
    """Weights and optimizer states in the host's memory instead of the GPU's."""
    host_buffers: int = 0
    """Further buffers in the host's memory for offloaded states."""
    locked: int = 0
    """Those of ``host_buffers`` that are locked in memory for transfers to NVMe."""
    swapped: int = 0
    """Weights and optimizer states on NVMe."""
    swap_buffers: int = 0
    """Further bytes on NVMe: gradients of the optimizer's step."""
    prefetch: int = 0
    """A buffer of weights gathered together, beside them until the last one is used in the forward pass."""

    @property
    def persistent(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def saved(self) -> int:
        """Returns the bytes of weights and optimizer states, wherever they are: the contents of a checkpoint."""
        return self.weights + self.optimizer + self.offloaded + self.swapped


@dataclass(frozen=True, slots=True)
class HostWork:
    """Bytes that one rank moves in an iteration for states kept in its host's memory, or on NVMe."""

    updated: int = 0
    """Bytes that the optimizer reads and writes in the host's memory."""
    gradients: int = 0
    """Bytes between GPU and host during the backward passes."""
    weights: int = 0
    """Bytes from host to GPU before the GPU can compute with the weights."""
    nvme: int = 0
    """Bytes between the host's memory and NVMe."""


def layers_of_stage(experiment: Experiment, stage: int) -> int:
    """Returns the number of layers of one stage, over all virtual stages of an interleaved pipeline.

    The first and the last stage may have their own number (megatron-core). If the layers do not divide evenly, the
    first stages have one more (DeepSpeed's ``partition_method="type:transformer"``, and engine torch).
    """
    parallel, layers = experiment.parallel, experiment.model.num_layers
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    stages = parallel.pipeline_model_parallel_size
    if stage == 0 and first is not None:
        return first
    if stage == stages - 1 and last is not None:
        return last
    each, rest = divmod(layers - (first or 0) - (last or 0), stages - (first is not None) - (last is not None))
    return each + (1 if stage < rest else 0)


def unlike_stages(experiment: Experiment) -> list[int]:
    """Returns the stages to look at: those in between equal the second, or have a layer less."""
    last = experiment.parallel.pipeline_model_parallel_size - 1
    return sorted({0, min(1, last), last})


def recomputed_layers(experiment: Experiment, layers: int) -> int:
    """Returns how many of a stage's layers the backward pass recomputes fully."""
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
    """Returns the maximum number of forward passes of a stage (or virtual stage) whose backward pass is outstanding.

    GPipe: all. 1F1B: one for each stage from this one to the last (Narayanan et al., 2021, section 2.2).
    Interleaved: Megatron's 2 (p - stage - 1) + (v - 1) p warm-up passes, and one more.
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
    """Returns the tokens of one micro batch on one context parallel rank."""
    share = experiment.model.seq_length // experiment.parallel.context_parallel_size
    return share * experiment.batch.micro_batch_size


def hidden_bytes(experiment: Experiment) -> int:
    """Returns the bytes of one context parallel rank's hidden states: [seq_length / cp, micro batch, hidden]."""
    return tokens_of(experiment) * experiment.model.hidden_size * FORMAT_BYTES[experiment.precision]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Number of weights of one rank, by purpose."""

    layers: int
    embedding: int
    """This rank's rows of the token table."""
    positions: int
    final_norm: int
    head: int
    """A separate output layer, or the copy of the tied tables on the last stage of a pipeline."""
    experts: int = 0
    """Weights of the experts, which ``layers`` does not include."""

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.embedding + self.positions + self.final_norm + self.head


def vocab_size(experiment: Experiment) -> int:
    """Returns the tokenizer's vocabulary size; GPT-2's if the experiment does not give one."""
    return experiment.model.vocab_size or GPT2_TOKENS


def layer_parameters(experiment: Experiment) -> int:
    """Returns the weights of one layer on one tensor parallel rank, without experts; of resnet50, its largest block."""
    if experiment.model.is_vision:
        return resnet.largest_block(experiment.model)
    return _layer_share(experiment.model, experiment.parallel.tensor_model_parallel_size)


@lru_cache(maxsize=256)
def _layer_share(model: Model, tensor: int) -> int:
    return sum(weight.share(tensor) for weight in layer_weights(model))


def expert_parameters(experiment: Experiment) -> int:
    """Returns the weights of one layer's experts on one rank."""
    model, parallel = experiment.model, experiment.parallel
    if not model.num_moe_experts:
        return 0
    each = sum(weight.share(parallel.expert_tensor_size) for weight in mlp_weights(model))
    return model.num_moe_experts // parallel.expert_model_parallel_size * each


def parameters_of_stage(experiment: Experiment, stage: int, rows: int, *, copies_positions: bool = False) -> Parameters:
    """Returns the weights of each rank of a stage; they do not depend on the rank's place in the other groups.

    ``rows``: of the token table, over all tensor parallel ranks. ``copies_positions``: the last stage of a pipeline
    also holds a copy of the position table.
    """
    model, stages = experiment.model, experiment.parallel.pipeline_model_parallel_size
    if model.is_vision:
        head = resnet.head_parameters(model)
        return Parameters(resnet.parameters(model) - head, 0, 0, 0, head)
    width = model.hidden_size
    # If the rows do not divide evenly, the first rank has the most.
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
