"""What the ranks of a layout send each other in one iteration, by group, and over which link.

Volumes are those of ring collectives, which nothing can undercut: of n bytes over g ranks, each sends 2 (g - 1) / g n
for an all-reduce and (g - 1) / g n for an all-gather or a reduce-scatter (Patarasuk and Yuan, 2009). Tensor parallel
volumes are those of Megatron (Shoeybi et al., 2019, section 3; Korthikanti et al., 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from tridock.experiment import Experiment
from tridock.plan.parameters import layers_of_stage, parameters_of_stage

Link = Literal["node", "network"]
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
    """Sent by one rank of the busiest stage in one iteration."""
    waits: int
    """Bytes of these that the rank waits for while it computes nothing; the same as bytes_per_rank but for the
    pipeline's, where it is what the slowest stage hands on."""


def traffic(experiment: Experiment, shape: Shape) -> list[Traffic]:
    """Of every group that has more than one rank."""
    groups = (_tensor, _context, _pipeline, _data, _embedding)
    return [one for group in groups for one in group(experiment, shape)]


def all_reduce(size: int, volume: float) -> float:
    """Bytes that each of ``size`` ranks sends to reduce ``volume`` bytes to all."""
    return 2 * (size - 1) / size * volume


def all_gather(size: int, volume: float) -> float:
    """Bytes that each of ``size`` ranks sends to gather ``volume`` bytes in all; a reduce-scatter's too."""
    return (size - 1) / size * volume


def hidden_bytes(experiment: Experiment) -> int:
    """One micro batch of hidden states on one context parallel rank, [seq_length / cp, micro batch, hidden]."""
    model, parallel = experiment.model, experiment.parallel
    tokens = model.seq_length // parallel.context_parallel_size * experiment.batch.micro_batch_size
    return tokens * model.hidden_size * FORMAT_BYTES[experiment.precision]


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


def _tensor(experiment: Experiment, shape: Shape) -> Iterator[Traffic]:
    size = experiment.parallel.tensor_model_parallel_size
    if size == 1:
        return
    layers = layers_of_stage(experiment, 0)
    # Two all-reduces of a forward pass, two of a backward pass, and two where the forward pass is done again.
    # With sequence parallelism a gather and a scatter stand for each, and the backward pass gathers its inputs again.
    reduces = 4 * layers + 2 * recomputed_layers(experiment, layers)
    volume = reduces * all_reduce(size, hidden_bytes(experiment))
    if experiment.parallel.sequence_parallel:
        volume += 2 * layers * all_gather(size, hidden_bytes(experiment))
    volume += 2 * all_reduce(size, hidden_bytes(experiment))  # the embedding's, and the head's backward pass
    yield _placed("tensor", size, 1, shape, volume * shape.accumulation)


def _context(experiment: Experiment, shape: Shape) -> Iterator[Traffic]:
    size, tensor = experiment.parallel.context_parallel_size, experiment.parallel.tensor_model_parallel_size
    if size == 1:
        return
    layers = layers_of_stage(experiment, 0)
    keys_and_values = 2 * hidden_bytes(experiment) * size / tensor
    passes = 2 * layers + recomputed_layers(experiment, layers)
    volume = passes * all_gather(size, keys_and_values) * shape.accumulation
    yield _placed("context", size, tensor, shape, volume)


def _pipeline(experiment: Experiment, shape: Shape) -> Iterator[Traffic]:
    parallel = experiment.parallel
    size, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if size == 1:
        return
    message = hidden_bytes(experiment)
    if parallel.sequence_parallel:
        message //= parallel.tensor_model_parallel_size
    stride = parallel.tensor_model_parallel_size * parallel.context_parallel_size * shape.data
    network = stride * size > shape.slots
    # Every stage but the ends sends one way and the other; the ring of an interleaved pipeline closes.
    sent = 2 * virtual * message * shape.accumulation
    waits = 2 * virtual * message * (shape.accumulation + size - 1)
    link: Link = "network" if network else "node"
    yield Traffic("pipeline", size, link, min(stride, shape.slots) if network else 1, sent, waits)


def _data(experiment: Experiment, shape: Shape) -> Iterator[Traffic]:
    parallel = experiment.parallel
    context = parallel.context_parallel_size
    size = shape.data * context
    if size == 1:
        return
    weights = max(
        parameters_of_stage(experiment, stage).total for stage in (0, parallel.pipeline_model_parallel_size - 1)
    )
    yield _placed(
        "data", size, parallel.tensor_model_parallel_size, shape, _gradient_bytes(experiment, shape, size, weights)
    )


def _gradient_bytes(experiment: Experiment, shape: Shape, size: int, weights: int) -> float:
    """What a rank sends for its gradients, and for the weights where their owners hand them out anew."""
    parallel, short = experiment.parallel, FORMAT_BYTES[experiment.precision]
    if experiment.engine == "megatron-core":
        if parallel.use_distributed_optimizer:
            return all_gather(size, 4 * weights) + all_gather(size, short * weights)
        return all_reduce(size, 4 * weights)
    if parallel.strategy == "ddp":
        return all_reduce(size, (4 if experiment.engine == "torch" else short) * weights)
    if parallel.zero_stage == 0:
        return all_reduce(size, short * weights)
    if parallel.zero_stage < 3:
        return 2 * all_gather(size, short * weights)
    # The weights are gathered for every forward and backward pass, and the gradients scattered after each.
    return 3 * all_gather(size, short * weights) * shape.accumulation


def _embedding(experiment: Experiment, shape: Shape) -> Iterator[Traffic]:
    """The tied table's gradient, which the first and the last stage both have a part of."""
    parallel = experiment.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages == 1:
        return
    width = 4 if experiment.engine == "megatron-core" else FORMAT_BYTES[experiment.precision]
    volume = all_reduce(2, width * parameters_of_stage(experiment, 0).embedding)
    stride = parallel.tensor_model_parallel_size * parallel.context_parallel_size * shape.data * (stages - 1)
    yield _placed("embedding", 2, stride, shape, volume)
