"""What the ranks of a layout send each other in one iteration, by group, and over which link.

Volumes are those of ring collectives, which nothing can undercut: of n bytes over g ranks, each sends 2 (g - 1) / g n
for an all-reduce and (g - 1) / g n for an all-gather or a reduce-scatter (Patarasuk and Yuan, 2009). Tensor parallel
volumes are those of Megatron (Shoeybi et al., 2019, section 3; Korthikanti et al., 2022, section 4.2.2). All are held
against what the engines were seen to send (``tests/distributed/test_traffic.py``), but for a few bytes: norms, losses,
and the padding of buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from tridock.engines.torch.legality import shards_of, shared_by_torch
from tridock.experiment import Experiment
from tridock.layout.shape import FORMAT_BYTES, Shape
from tridock.plan.parameters import layers_of_stage, parameters_of_stage

Link = Literal["node", "network"]
REUSED: Final = 1_000_000_000
"""DeepSpeed's stage3_max_reuse_distance: weights that are used again before so many others stay gathered."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one group exchanges."""

    group: str
    size: int
    """Ranks of the group."""
    link: Link
    """network where a group has ranks on more than one node."""
    sharing: int
    """Groups of this kind that use a node's network at the same time; 1 inside a node."""
    bytes_per_rank: int
    """Sent by one rank in one iteration."""
    waits: int
    """Bytes of these that the rank waits for while it computes nothing; the same as bytes_per_rank but for the
    pipeline's, where it is what the slowest stage hands on."""


def traffic(experiment: Experiment, shape: Shape) -> list[Traffic]:
    """Of every group that has more than one rank, on the stage that sends most in it."""
    last = experiment.parallel.pipeline_model_parallel_size - 1
    busiest: dict[str, Traffic] = {}
    for stage in sorted({0, min(1, last), last}):  # those in between are like the second, or have a layer less
        for one in traffic_of_stage(experiment, shape, stage):
            if one.group not in busiest or one.bytes_per_rank > busiest[one.group].bytes_per_rank:
                busiest[one.group] = one
    return list(busiest.values())


def traffic_of_stage(experiment: Experiment, shape: Shape, stage: int) -> list[Traffic]:
    """Of every group that a rank of this stage shares with others."""
    groups = (_tensor, _context, _pipeline, _data, _embedding)
    return [one for group in groups for one in group(experiment, shape, stage)]


def all_reduce(size: int, volume: float) -> float:
    """Bytes that each of ``size`` ranks sends to reduce ``volume`` bytes to all."""
    return 2 * (size - 1) / size * volume


def all_gather(size: int, volume: float) -> float:
    """Bytes that each of ``size`` ranks sends to gather ``volume`` bytes in all; a reduce-scatter's too."""
    return (size - 1) / size * volume


def hidden_bytes(experiment: Experiment) -> int:
    """One micro batch of hidden states on one context parallel rank, [seq_length / cp, micro batch, hidden]."""
    return _tokens(experiment) * experiment.model.hidden_size * FORMAT_BYTES[experiment.precision]


def _tokens(experiment: Experiment) -> int:
    """Of one micro batch, on one context parallel rank."""
    share = experiment.model.seq_length // experiment.parallel.context_parallel_size
    return share * experiment.batch.micro_batch_size


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


def _placed(group: str, size: int, stride: int, shape: Shape, volume: float) -> Traffic:
    """A group of ranks that lie ``stride`` apart."""
    inside = stride * size <= shape.slots and shape.slots % (stride * size) == 0
    together = 1 if stride >= shape.slots else min(size, shape.slots // stride)
    sharing = 1 if inside else max(1, shape.slots // together)
    link: Link = "node" if inside else "network"
    return Traffic(group, size, link, sharing, round(volume), round(volume))


def _tensor(experiment: Experiment, shape: Shape, stage: int) -> Iterator[Traffic]:
    model, parallel = experiment.model, experiment.parallel
    size, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if size == 1:
        return
    layers, final = layers_of_stage(experiment, stage), stage == stages - 1
    hidden = hidden_bytes(experiment)
    # Two all-reduces of a layer's forward pass, two of its backward pass, two where the forward pass is done again;
    # one of the embedding, one of the head's backward pass.
    reduces = 4 * layers + 2 * recomputed_layers(experiment, layers) + (stage == 0) + final
    volume = reduces * all_reduce(size, hidden)
    if parallel.sequence_parallel:
        # A gather and a scatter stand for each, but for the embedding's, after which every rank keeps its part. The
        # backward pass gathers what it no longer has: the inputs of both halves of a layer and of the head, and the
        # embedding's gradient.
        volume += (2 * layers + (stage == 0) + final) * all_gather(size, hidden)
    if final:
        # Of each token's logits, in fp32: the largest, the label's, and the sum of the exponentials.
        volume += 3 * all_reduce(size, 4 * _tokens(experiment))
    if experiment.engine == "megatron-deepspeed":
        # Between stages DeepSpeed sends each rank's part; who receives an output gathers it, and who sent it does so
        # for the backward pass, with its gradient.
        volume += ((stage > 0) + 2 * (not final)) * all_gather(size, hidden)
        if model.checkpoint_activations and model.partition_activations:
            volume += math.ceil(layers / model.checkpoint_num_layers) * all_gather(size, hidden)
    volume *= shape.accumulation
    if parallel.sequence_parallel:
        # Each has the gradients of its tokens only: norms, and biases of what is split by rows, in fp32.
        volume += all_reduce(size, 4 * model.hidden_size * (6 * layers + (2 if final else 0)))
    yield _placed("tensor", size, 1, shape, volume)


def _context(experiment: Experiment, shape: Shape, stage: int) -> Iterator[Traffic]:
    size, tensor = experiment.parallel.context_parallel_size, experiment.parallel.tensor_model_parallel_size
    if size == 1:
        return
    layers = layers_of_stage(experiment, stage)
    keys_and_values = 2 * hidden_bytes(experiment) * size / tensor
    # Gathered in the forward pass, and where it is done again; their gradients scattered in the backward pass.
    selective = experiment.model.recompute_granularity == "selective"
    again = layers if selective else recomputed_layers(experiment, layers)
    volume = (2 * layers + again) * all_gather(size, keys_and_values) * shape.accumulation
    yield _placed("context", size, tensor, shape, volume)


def _pipeline(experiment: Experiment, shape: Shape, stage: int) -> Iterator[Traffic]:
    parallel = experiment.parallel
    size, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if size == 1:
        return
    message, mask = hidden_bytes(experiment), 0
    if parallel.sequence_parallel or experiment.engine == "megatron-deepspeed":
        message //= parallel.tensor_model_parallel_size
    if experiment.engine == "megatron-deepspeed":
        mask = 2 * experiment.model.seq_length**2  # goes with every output, in fp16
    stride = parallel.tensor_model_parallel_size * parallel.context_parallel_size * shape.data
    network = stride * size > shape.slots
    # Of each run of layers what comes out goes on and the gradient of what came in goes back, but for the model's
    # last output and first input.
    outputs, gradients = virtual - (stage == size - 1), virtual - (stage == 0)
    sent = (outputs * (message + mask) + gradients * message) * shape.accumulation
    # A stage waits for one message each way of each run; filling and draining, for those of the stages before it.
    waits = (2 * message + mask) * (virtual * shape.accumulation + size - 1)
    link: Link = "network" if network else "node"
    yield Traffic("pipeline", size, link, min(stride, shape.slots) if network else 1, sent, waits)


def _data(experiment: Experiment, shape: Shape, stage: int) -> Iterator[Traffic]:
    parallel = experiment.parallel
    size = shape.data * parallel.context_parallel_size
    if size == 1:
        return
    volume = _gradient_bytes(experiment, shape, size, parameters_of_stage(experiment, stage).total)
    yield _placed("data", size, parallel.tensor_model_parallel_size, shape, volume)


def _gradient_bytes(experiment: Experiment, shape: Shape, size: int, weights: int) -> float:
    """What a rank sends for its gradients, and for the weights where their owners hand them out anew."""
    parallel, short = experiment.parallel, FORMAT_BYTES[experiment.precision]
    if experiment.engine == "megatron-core":
        if parallel.use_distributed_optimizer:
            return all_gather(size, 4 * weights) + all_gather(size, short * weights)
        return all_reduce(size, 4 * weights)
    if shared_by_torch(experiment):
        return _shared_bytes(experiment, shape, size, weights)
    if parallel.strategy == "ddp":
        return all_reduce(size, (4 if experiment.engine == "torch" else short) * weights)
    gradients, gathered = all_reduce(size, short * weights), all_gather(size, short * weights)
    if parallel.zero_stage == 0:
        return gradients
    # DeepSpeed's stages 1 and 2 sum gradients everywhere, and each rank keeps its part; stage 2 after each micro batch.
    if parallel.zero_stage == 1:
        return gradients + gathered
    if parallel.zero_stage == 2:
        return gradients * shape.accumulation + gathered
    # Stage 3 gathers weights for each micro batch, anew for the backward pass where it is long until then, and
    # scatters the gradients. Tensors of less than 1e5 elements stay; here they are counted as if they did not.
    again = all_gather(size, short * max(0, weights - REUSED // 2))
    return (2 * gathered + again) * shape.accumulation


def _shared_bytes(experiment: Experiment, shape: Shape, size: int, weights: int) -> float:
    """FSDP2 gathers weights for each micro batch, and anew for its backward pass; gradients go once a step, in fp32."""
    shards, short = shards_of(experiment, size), FORMAT_BYTES[experiment.precision]
    gathered = 2 * all_gather(shards, short * weights) * shape.accumulation
    return gathered + all_gather(shards, 4 * weights) + all_reduce(size // shards, 4 * weights / shards)


def _embedding(experiment: Experiment, shape: Shape, stage: int) -> Iterator[Traffic]:
    """The tied table's gradient, which the first and the last stage both have a part of."""
    parallel = experiment.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages == 1 or stage not in (0, stages - 1):
        return
    width = FORMAT_BYTES[experiment.precision] if experiment.engine == "megatron-deepspeed" else 4
    shards = shards_of(experiment, shape.data) if experiment.engine == "torch" else 1
    volume = all_reduce(2, width * parameters_of_stage(experiment, 0).embedding / shards)
    stride = parallel.tensor_model_parallel_size * parallel.context_parallel_size * shape.data * (stages - 1)
    yield _placed("embedding", 2, stride, shape, volume)
