"""Communication volume of a layout's groups in one iteration, and the link that carries it.

Volumes are those of ring collectives, which are the lower bound: of n bytes over g ranks, each sends 2 (g - 1) / g n
for an all-reduce and (g - 1) / g n for an all-gather or a reduce-scatter (Patarasuk and Yuan, 2009). Tensor parallel
volumes are those of Megatron (Shoeybi et al., 2019, section 3; Korthikanti et al., 2022, section 4.2.2). All were
checked against what the engines send (``tests/distributed/test_traffic.py``), except a few bytes: norms, losses,
and the padding of buffers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tridock.experiment import Experiment
from tridock.experiment.parameters import layer_weights, norm_vectors, position_rows
from tridock.experiment.schema import Parallel
from tridock.layout.shape import LayoutShape, hidden_bytes, layers_of_stage, recomputed_layers, tokens_of

Link = Literal["node", "network"]
TensorOverlap = Literal["none", "weight gradients", "products"]
"""What tensor parallel ranks compute while they exchange activations and their gradients: the weight gradients, beside
which the activations' are summed; or every product, in pieces (transformer-engine's tp_comm_overlap)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    group: str
    size: int
    """Ranks of the group."""
    link: Link
    """``network`` if a group has ranks on more than one node."""
    sharing: int
    """Groups of this kind that use the same links at the same time: a node's network, or inside a node those of the
    other groups that the same ranks span. Only links without a switch (PCIe) are shared inside a node."""
    bytes_per_rank: int
    """Bytes that one rank sends in one iteration."""
    waits: int
    """The part of bytes_per_rank that the rank waits for while it computes nothing. The two are equal except for the
    pipeline's, where it is what the slowest stage sends."""
    messages: int = 1
    """Sequential collectives, or messages, that a rank waits for."""
    together: int = 1
    """Ranks of the group on one node."""
    hideable: float = 0.0
    """Share of ``waits`` that computation can hide if it takes long enough: for the tensor parallel group, the
    computation of weight gradients."""

    @property
    def span(self) -> int:
        """Neighboring ranks of a node that its groups of this kind connect."""
        return self.size * self.sharing


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that a rank of a stage sends in one iteration, as its engine does it."""

    gradient_bytes: float
    """Bytes in the data parallel group, including gathered weights."""
    embedding_bytes: float
    """Bytes of the tied table's gradient, summed over all tensor parallel ranks of a stage."""
    tensor_bytes: float = 0.0
    """Bytes of one micro batch in the tensor parallel group, besides those of Megatron's split of a layer."""
    splits_messages: bool = False
    """Each tensor parallel rank sends only its part of the tensors between stages."""
    mask_bytes: int = 0
    """Bytes of the attention mask that is sent with every output of a stage."""
    overlapped: float = 0.0
    """Share of gradient_bytes that is sent while the rank computes."""
    computing: float = 0.0
    """Share of an iteration's computation that overlaps with it."""
    messages: int = 1
    """Number of collectives that carry gradient_bytes."""
    tensor_overlap: TensorOverlap = "none"
    expert_gradient_bytes: float = 0.0
    """The counterpart of gradient_bytes for experts, in the group of ranks with the same experts."""
    hides_pipeline: bool = False
    """Whether stages compute while they send, except while the pipeline fills."""


def traffic_of_stage(experiment: Experiment, shape: LayoutShape, stage: int, sent: Sent) -> list[Traffic]:
    """Returns the traffic of every group that a rank of this stage shares with other ranks."""
    groups = (_tensor, _context, _pipeline, _data, _embedding, _expert, _expert_tensor, _expert_data)
    return [one for group in groups for one in group(experiment, shape, stage, sent)]


def all_reduce(size: int, volume: float) -> float:
    """Returns the bytes that each of ``size`` ranks sends to all-reduce ``volume`` bytes."""
    return 2 * (size - 1) / size * volume


def all_gather(size: int, volume: float) -> float:
    """Returns the bytes that each of ``size`` ranks sends to all-gather ``volume`` bytes, or to reduce-scatter them."""
    return (size - 1) / size * volume


def backward_pass(passes: int = 1) -> float:
    """Returns the share of the computation of one of ``passes`` backward passes: it costs twice a forward pass."""
    return 2 / 3 / passes


def _placed(
    group: str, size: int, stride: int, shape: LayoutShape, volume: float, messages: int = 1, hideable: float = 0.0
) -> Traffic:
    """Places a group of ranks that are ``stride`` apart."""
    inside = stride * size <= shape.slots and shape.slots % (stride * size) == 0
    together = size if inside else 1 if stride >= shape.slots else min(size, shape.slots // stride)
    sharing = stride if inside else max(1, shape.slots // together)
    link: Link = "node" if inside else "network"
    return Traffic(group, size, link, sharing, round(volume), round(volume), messages, together, hideable)


def _tensor(experiment: Experiment, shape: LayoutShape, stage: int, sent: Sent) -> Iterator[Traffic]:
    model, parallel = experiment.model, experiment.parallel
    size, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if size == 1:
        return
    layers, final = layers_of_stage(experiment, stage), stage == stages - 1
    hidden = hidden_bytes(experiment)
    # Two all-reduces in a layer's forward pass, two in its backward pass, two if the forward pass is recomputed; one
    # for the embedding, one for the head's backward pass. With a mixture of experts only attention and shared experts.
    halves = 1 if model.num_moe_experts and model.moe_shared_expert_intermediate_size is None else 2
    reduces = 2 * halves * layers + halves * recomputed_layers(experiment, layers) + (stage == 0) + final
    volume = reduces * all_reduce(size, hidden)
    hidden_volume = 0.0
    if sent.tensor_overlap == "weight gradients":
        hidden_volume = halves * layers * all_reduce(size, hidden)
    elif sent.tensor_overlap == "products":
        # Ranks pass on a piece while they multiply another: nothing is left to multiply beside the last piece of a
        # reduce-scatter.
        scattered = (2 * halves * layers + halves * recomputed_layers(experiment, layers)) * all_gather(size, hidden)
        hidden_volume = (2 - 1 / size) * scattered + halves * layers * all_gather(size, hidden)
    messages = reduces * (2 if parallel.sequence_parallel else 1) * shape.accumulation
    if parallel.sequence_parallel:
        # An all-gather and a reduce-scatter replace each, except the embedding's, after which every rank keeps its
        # part; without a position table it is scattered at once. The backward pass gathers what it no longer has: the
        # inputs of both halves of a layer and of the head, and the embedding's gradient.
        embedding = stage == 0 and position_rows(model) > 0
        volume += (halves * layers + embedding + final) * all_gather(size, hidden)
    if final:
        # For each token, in fp32: the largest logit, the label's logit, and the sum of the exponentials.
        volume += 3 * all_reduce(size, 4 * tokens_of(experiment))
    volume += sent.tensor_bytes
    hideable = hidden_volume / volume
    volume *= shape.accumulation
    # Of replicated weights, each rank has the gradients of its heads only, and with sequence parallelism of its tokens,
    # in fp32.
    whole = sum(weight.elements for weight in layer_weights(model) if not weight.is_split)
    norms = norm_vectors(model)
    of_heads = 0 if model.qk_layernorm_all_heads else sum(model.query_and_key_norms)
    partial = whole if parallel.sequence_parallel else norms * of_heads
    last = norms * model.hidden_size if final and parallel.sequence_parallel else 0
    volume += all_reduce(size, 4 * (layers * partial + last))
    yield _placed("tensor", size, 1, shape, volume, messages, hideable)


def _context(experiment: Experiment, shape: LayoutShape, stage: int, _sent: Sent) -> Iterator[Traffic]:
    size, tensor = experiment.parallel.context_parallel_size, experiment.parallel.tensor_model_parallel_size
    if size == 1:
        return
    layers = layers_of_stage(experiment, stage)
    model = experiment.model
    keys_and_values = 2 * hidden_bytes(experiment) * size / tensor * model.key_size / model.hidden_size
    # Gathered in the forward pass and its recomputation; their gradients are scattered in the backward pass.
    selective = experiment.model.recompute_granularity == "selective"
    again = layers if selective else recomputed_layers(experiment, layers)
    volume = (2 * layers + again) * all_gather(size, keys_and_values) * shape.accumulation
    messages = (2 * layers + again) * shape.accumulation
    yield _placed("context", size, tensor, shape, volume, messages)


def _pipeline(experiment: Experiment, shape: LayoutShape, stage: int, sent: Sent) -> Iterator[Traffic]:
    parallel = experiment.parallel
    size, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if size == 1:
        return
    message, mask = hidden_bytes(experiment), sent.mask_bytes
    if parallel.sequence_parallel or sent.splits_messages:
        message //= parallel.tensor_model_parallel_size
    stride = _stage_stride(parallel, shape)
    network = stride * size > shape.slots
    # Each virtual stage sends its output forward and the gradient of its input back, except the model's
    # last output and first input.
    outputs, gradients = virtual - (stage == size - 1), virtual - (stage == 0)
    volume = (outputs * (message + mask) + gradients * message) * shape.accumulation
    # A stage waits for one message each way of each virtual stage; to fill and drain, for those of the stages before
    # it.
    steady = virtual * shape.accumulation
    waits = (2 * message + mask) * (steady + size - 1)
    hideable = steady / (steady + size - 1) if sent.hides_pipeline else 0.0
    link: Link = "network" if network else "node"
    sharing = min(stride, shape.slots)
    yield Traffic("pipeline", size, link, sharing, volume, waits, 2 * (steady + size - 1), size, hideable)


def _data(experiment: Experiment, shape: LayoutShape, _stage: int, sent: Sent) -> Iterator[Traffic]:
    parallel = experiment.parallel
    size = shape.data * parallel.context_parallel_size
    if size == 1:
        return
    between = parallel.pipeline_model_parallel_size if parallel.use_tp_pp_dp_mapping else 1
    stride = parallel.tensor_model_parallel_size * between
    yield _placed("data", size, stride, shape, sent.gradient_bytes, sent.messages)


def _embedding(experiment: Experiment, shape: LayoutShape, stage: int, sent: Sent) -> Iterator[Traffic]:
    """Yields the tied table's gradient: the first and the last stage each compute a part of it."""
    parallel = experiment.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages == 1 or stage not in (0, stages - 1) or experiment.model.untie_embeddings_and_output_weights:
        return
    stride = _stage_stride(parallel, shape)
    found = _placed("embedding", 2, stride * (stages - 1), shape, all_reduce(2, sent.embedding_bytes))
    # Between the two lie the other stages: the group is on one node if all of the pipeline is.
    inside = shape.slots % (stride * stages) == 0
    yield replace(found, link="node", together=2, sharing=stride * stages // 2) if inside else found


def _expert(experiment: Experiment, shape: LayoutShape, stage: int, _sent: Sent) -> Iterator[Traffic]:
    """Yields the all-to-all of tokens to their experts' ranks and back, if every expert takes equally many tokens."""
    parallel, size = experiment.parallel, experiment.parallel.expert_model_parallel_size
    if size == 1:
        return
    passes = _expert_passes(experiment, stage) * shape.accumulation
    volume = passes * all_gather(size, routed_bytes(experiment))
    yield _placed("expert", size, parallel.expert_tensor_size, shape, volume, round(passes * 1.5))


def _expert_tensor(experiment: Experiment, shape: LayoutShape, stage: int, _sent: Sent) -> Iterator[Traffic]:
    """Yields the tokens of all ranks that split an expert, gathered by each, and their results, scattered."""
    size = experiment.parallel.expert_tensor_size
    if size == 1 or experiment.model.num_moe_experts is None:
        return
    passes = _expert_passes(experiment, stage) * shape.accumulation
    volume = passes * all_gather(size, size * routed_bytes(experiment))
    yield _placed("expert tensor", size, 1, shape, volume, round(passes * 1.5))


def _expert_passes(experiment: Experiment, stage: int) -> int:
    """Returns how often a micro batch's tokens move between ranks: to and from the experts, forward, backward, and in a
    recomputed forward pass."""
    layers = layers_of_stage(experiment, stage)
    return 4 * layers + 2 * recomputed_layers(experiment, layers)


def routed_bytes(experiment: Experiment) -> float:
    """Returns the bytes of a rank's hidden states, one for each token and expert."""
    shared = experiment.parallel.tensor_model_parallel_size  # sequence parallelism is always on
    return hidden_bytes(experiment) * experiment.model.active_experts / shared


def expert_replicas(experiment: Experiment, replicas: int) -> int:
    """Returns how many ranks of a pipeline stage have the same experts, given the replicas of the other weights."""
    parallel = experiment.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size * replicas
    return ranks // (parallel.expert_tensor_size * parallel.expert_model_parallel_size)


def _expert_data(experiment: Experiment, shape: LayoutShape, _stage: int, sent: Sent) -> Iterator[Traffic]:
    parallel = experiment.parallel
    if experiment.model.num_moe_experts is None or (size := expert_replicas(experiment, shape.data)) == 1:
        return
    between = parallel.pipeline_model_parallel_size if parallel.use_tp_pp_dp_mapping else 1
    stride = parallel.expert_tensor_size * parallel.expert_model_parallel_size * between
    yield _placed("expert data", size, stride, shape, sent.expert_gradient_bytes, sent.messages)


def _stage_stride(parallel: Parallel, shape: LayoutShape) -> int:
    """Returns the rank offset from one stage of a pipeline to the next."""
    neighbours = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return neighbours if parallel.use_tp_pp_dp_mapping else neighbours * shape.data
