"""What a rank keeps from step to step, and what its gradients and its optimizer take on top while a step goes on.

Bytes a weight, in fp16 and bf16 (e: the format's 2; in fp32 4, without a master copy but where noted); r: replicas that
share a state out:

========================================  =========  ==============  ====================================
engine and strategy                       weights    gradients       optimizer: master weights, two moments
========================================  =========  ==============  ====================================
megatron-core                             e          4               4 + 8, over r if distributed
torch, ddp                                4          4               8
torch, fsdp; split by tensor or stage     4 / r      4 / r, in a     8 / r, with r 1 without fsdp
                                                     step
DeepSpeed, ZeRO 0                         e          e, in a step    4 + 8
DeepSpeed, ZeRO 1                         e          e, in a step    (4 + 8) / r, the master in fp32 too
DeepSpeed, ZeRO 2                         e          e / r           (4 + 8) / r, the master in fp32 too
DeepSpeed, ZeRO 3                         e / r      e / r           (4 + 8) / r, the master in fp32 too
Megatron v1.1.5, ddp                      e          e + 4, fp32: 4  4 + 8
========================================  =========  ==============  ====================================

Read in the engines' sources and counted on CPU ranks (docs/planner.md). DeepSpeed's ZeRO 1 to 3 reduce gradients
through a bucket of 5e8 elements, which is there whole; ZeRO 3 holds up to 1e9 gathered weights, and keeps those of
less than 1e5 elements whole. FSDP2 sums the gradients of several micro-batches up whole, in fp32, before it scatters
them (:mod:`~tridock.plan.fsdp_peak`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tridock.engines.torch.legality import shards_of, shared_by_torch
from tridock.experiment import Experiment
from tridock.layout.shape import FORMAT_BYTES, Shape
from tridock.plan.activations import Device
from tridock.plan.parameters import Parameters

BUCKET: Final = 500_000_000
LIVE: Final = 1_050_000_000
"""max_live_parameters and one prefetch bucket."""
PERSISTENT: Final = 100_000


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank."""

    weights: int
    gradients: int
    """Kept between steps; the engine's buffers for them."""
    optimizer: int
    passing: int
    """Gradients that come with the first backward pass of a step and go with its end."""
    bucket: int
    """What gradients are reduced through, during the backward passes."""
    gathered: int
    """Weights that are there whole for a while."""
    workspace: int
    """While the optimizer steps, when the activations are gone."""

    @property
    def lasting(self) -> int:
        return self.weights + self.gradients + self.optimizer


def states_of(experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
    """Of a rank with these weights, replicas and micro-batches."""
    replicas = shape.data * experiment.parallel.context_parallel_size
    short, count = FORMAT_BYTES[experiment.precision], weights.total
    if experiment.engine == "megatron-core":
        return _megatron_core(experiment, count, short, replicas, device)
    if experiment.parallel.strategy == "zero":
        return _zero(experiment, weights, short, replicas)
    if experiment.engine == "torch":
        if shared_by_torch(experiment):
            return _sharded(experiment, weights, short, shape)
        # The fused AdamW works in place.
        return States(4 * count, 4 * count, 8 * count, 0, 0, 0, 0)
    again = 4 if short == 2 else 0  # gradients, and weights, once more in fp32
    return States(short * count, (short + again) * count, (again + 8) * count, 0, 0, 0, 0)


def _megatron_core(experiment: Experiment, count: int, short: int, replicas: int, device: Device) -> States:
    distributed = experiment.parallel.use_distributed_optimizer
    owned = count // replicas if distributed else count
    # On GPUs Adam is apex's or transformer-engine's, and works in place. On CPUs Gloo scatters a copy of the gradients.
    workspace = 4 * count if device == "cpu" and distributed and replicas > 1 else 0
    return States(short * count, 4 * count, (12 if short == 2 else 8) * owned, 0, 0, 0, workspace)


def _sharded(experiment: Experiment, weights: Parameters, short: int, shape: Shape) -> States:
    """FSDP2 gathers layer by layer, and the embeddings and the last norm for the whole step.

    The gathered layers of a backward pass are among its activations' terms.
    """
    count, owned = weights.total, -(-weights.total // shards_of(experiment, shape.data))
    # Gradients come with the first backward pass, and go after the optimizer, which works in place.
    return States(4 * owned, 0, 8 * owned, 4 * owned, 0, short * (count - weights.layers), 0)


def _zero(experiment: Experiment, weights: Parameters, short: int, replicas: int) -> States:
    stage, count = experiment.parallel.zero_stage, weights.total
    owned = -(-count // replicas)
    if stage == 0:
        master = 4 if short == 2 else 0
        return States(short * count, 0, (master + 8) * count, short * count, 0, 0, master * count)
    # In a pipeline it has two of them.
    stages = experiment.parallel.pipeline_model_parallel_size
    optimizer, bucket = 12 * owned, short * BUCKET * (1 if stages == 1 else 2)
    if stage < 3:
        passing = short * (count if stage == 1 else owned)
        return States(short * count, 0, optimizer, passing, bucket, 0, (4 + short) * owned)
    small = sum(_small_tensors(experiment, weights))
    kept = small + owned if replicas > 1 else count
    gathered = short * min(count - small, LIVE) if replicas > 1 else 0
    return States(short * kept, short * owned, optimizer, 0, bucket, gathered, 4 * min(owned, 2 * BUCKET))


def _small_tensors(experiment: Experiment, weights: Parameters) -> Iterator[int]:
    """Elements of the weights that ZeRO 3 leaves whole on every rank."""
    model, tensor = experiment.model, experiment.parallel.tensor_model_parallel_size
    width = model.hidden_size
    matrix = width * width // tensor
    layer = [3 * matrix, matrix, 4 * matrix, 4 * matrix, *(3 * width // tensor, 4 * width // tensor), *[width] * 6]
    tables = [weights.embedding, weights.positions, weights.head]
    yield from (size * model.num_layers for size in layer if size <= PERSISTENT)
    yield from (size for size in tables if size <= PERSISTENT)
    yield weights.final_norm
