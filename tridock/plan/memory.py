"""Memory of a rank, stage by stage, term by term, compared with its GPU's.

The engine gives the bytes of weights, gradients and optimizer states, and the peak of a step on top of them
(:mod:`~tridock.layout.activations`). A step peaks either in its backward passes or in the optimizer step, never in
both. Before the first step a rank may hold more (``States.startup``): megatron-core's distributed optimizer moves the
weights to a buffer, and ZeRO 3 gathers each tensor.

A GPU rank also uses a varying amount of memory that no tensor of the run accounts for: CUDA's context, NCCL's buffers
for each communicator, and blocks that torch's allocator cannot reuse because a step's temporary tensors have other
sizes. The plan is therefore an interval. A run does not fit if even the lower end exceeds the GPU's memory. It is
tight if the upper end exceeds 80 % of it.

Bytes a weight of the states, in fp16 and bf16 (e: the format's 2; in fp32 4, without a master copy unless noted);
r: replicas that a state is partitioned over:

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

Taken from the engines' sources and counted on CPU ranks (docs/planner.md). DeepSpeed's ZeRO 1 to 3 reduce gradients
through a bucket of 5e8 elements, which is allocated whole. ZeRO 3 holds 1e9 gathered weights and up to a tensor more,
and does not partition tensors of fewer than 1e5 elements. FSDP2 accumulates the gradients of several micro-batches
unsharded, in fp32, before it scatters them (:mod:`~tridock.engines.torch.fsdp`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tridock.engines import engine_of
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.activations import AFTER_FORWARD, Attention
from tridock.layout.shape import (
    OVERLAP,
    Device,
    Parameters,
    Shape,
    States,
    Term,
    layers_of_stage,
    least_bytes,
    total_bytes,
)
from tridock.plan.correction import Correction

Fit = Literal["fits", "tight", "no-fit"]
TIGHT: Final = 0.8
"""Share of a GPU's memory above which a run may run out: of 454 published runs, none with an estimate below it did
(Fujii et al., 2024, arXiv 2411.06465)."""
GIB: Final = 2**30
_PERSISTENT: Final = (
    "weights", "gradients", "optimizer states", "start-up", OVERLAP, "cached buffers",
    "TransformerEngine", "empty gradients", "fp8 weights",
)  # fmt: skip
"""Terms that are not temporary within a step."""
OVERHEAD: Final = ("CUDA context", "NCCL", "fragmentation", OVERLAP)
"""Terms that no tensor accounts for."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one rank of a pipeline stage."""

    stage: int
    layers: int
    parameters: Parameters
    terms: tuple[Term, ...]
    state_bytes: int
    """Weights, gradients and optimizer states: the terms that last from step to step."""
    startup_bytes: int
    """The rank's peak before its first step; the terms include it if it exceeds the peak of a step."""
    copied_bytes: int
    """Host memory, not GPU memory, at most: the copy of a checkpoint that is written in the background."""
    offloaded_bytes: int
    """Host memory too: weights and optimizer states kept there instead of on the GPU, and their buffers."""
    locked_bytes: int
    """Those of ``offloaded_bytes`` that are locked in memory, for transfers to NVMe."""
    nvme_bytes: int
    """Weights, optimizer states and gradients on NVMe."""
    limit_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return total_bytes(self.terms)

    @property
    def least_bytes(self) -> int:
        """Returns the interval's lower end: the least overhead, and no memory that the allocator merely caches."""
        return least_bytes(self.terms)

    @property
    def share(self) -> float | None:
        """Returns the maximum share of the GPU's memory; None if its size is unknown."""
        return None if self.limit_bytes is None else self.total_bytes / self.limit_bytes

    @property
    def fit(self) -> Fit:
        """Returns whether the GPU's memory suffices; a GPU of unknown size counts as large enough."""
        if self.limit_bytes is None or self.total_bytes <= TIGHT * self.limit_bytes:
            return "fits"
        return "tight" if self.least_bytes <= self.limit_bytes else "no-fit"


def tensor_bytes(terms: Iterable[Term]) -> int:
    """Returns the most that torch allocates."""
    return total_bytes(term for term in terms if term.name not in OVERHEAD)


def memory_of_stage(
    experiment: Experiment,
    stage: int,
    shape: Shape,
    gpu: Gpu | None,
    correction: Correction | None = None,
    groups: int | None = None,
    attention: Attention = "fused",
) -> StageMemory:
    """Returns all terms of one rank of ``stage``; without a GPU, those of a CPU rank, which has no GPU overhead.

    ``groups``: the communicators of a rank, if known. A run's ``correction`` is a separate term, negative if the run
    took less memory than its plan.
    """
    device: Device = "cpu" if gpu is None else "cuda"
    stepwise = gpu is not None and engine_of(experiment).stepwise_norms(experiment, gpu)
    train = experiment.train
    copies = train.save and train.async_save and train.save_interval > 0
    weights = engine_of(experiment).parameters(experiment, stage)
    states = engine_of(experiment).states(experiment, weights, shape, device)
    terms = [
        *_persistent(states, weights.total),
        *_temporary(experiment, stage, shape, states, device, attention, stepwise),
    ]
    excess = max(0, states.startup - total_bytes(terms))
    terms.append(Term("start-up", excess, "weights that are there twice before the first step"))
    if correction is not None and gpu is not None:
        source = f"{correction.source} allocated {correction.memory:.3g} times what its plan has"
        terms.append(Term("measured by a run", round((correction.memory - 1) * total_bytes(terms)), source))
    if gpu is not None:
        terms += engine_of(experiment).gpu_terms(experiment, shape)
        count = communicators(experiment, shape) if groups is None else groups
        terms += overhead_terms(count, terms, gpu.memory_bytes, exchanging_ranks(experiment, shape))
    return StageMemory(
        stage=stage,
        layers=layers_of_stage(experiment, stage),
        parameters=weights,
        terms=tuple(term for term in terms if term.bytes),
        state_bytes=states.persistent + states.step_gradients,
        startup_bytes=states.startup,
        copied_bytes=engine_of(experiment).copied_bytes(experiment, weights, states) if copies else 0,
        offloaded_bytes=states.offloaded + states.host_buffers,
        locked_bytes=states.locked,
        nvme_bytes=states.swapped + states.swap_buffers,
        limit_bytes=None if gpu is None else gpu.memory_bytes,
    )


def _persistent(states: States, count: int) -> Iterator[Term]:
    """Yields what the engine keeps from step to step, with its bytes a parameter, which differ (docs/planner.md)."""
    for name, value in (
        ("weights", states.weights),
        ("gradients", states.gradients),
        ("optimizer states", states.optimizer),
    ):
        yield Term(name, value, f"{value / count:.3g} bytes a parameter, kept from step to step")


def _temporary(
    experiment: Experiment,
    stage: int,
    shape: Shape,
    states: States,
    device: Device,
    attention: Attention,
    stepwise_norms: bool,
) -> Iterator[Term]:
    """Yields the temporary memory of a step: of its backward passes or, if larger, of the optimizer step."""
    terms = engine_of(experiment).activation_terms(
        experiment, stage, shape.accumulation, device, attention, stepwise_norms=stepwise_norms
    )
    yield from terms
    yield Term("gathered weights", states.gathered, "ZeRO 3: 1e9 and a tensor; FSDP2: embeddings and last norm")
    later = sum(term.bytes for term in terms if term.name in AFTER_FORWARD)
    beside = max(0, states.prefetch - later)
    yield Term("prefetched weights", beside, "ZeRO 3: stage3_prefetch_bucket_size and a tensor, in the forward pass")
    yield Term("gradient bucket", states.bucket, "DeepSpeed's reduce_bucket_size, 5e8 elements")
    backward = total_bytes(terms) + states.gathered + beside + states.bucket
    engine, activations = engine_of(experiment), total_bytes(terms)
    accumulated = engine.accumulated_gradients(experiment, stage, shape, states, device, activations)
    yield Term("gradients of a step", accumulated, "from the first backward pass to the optimizer's step")
    excess = max(0, states.step_gradients - accumulated + states.workspace - backward)
    yield Term("optimizer's step", excess, "its gradients and workspace, beyond the room of the above")


def memory_of_stages(
    experiment: Experiment,
    shape: Shape,
    gpu: Gpu | None,
    correction: Correction | None = None,
    attention: Attention = "fused",
) -> tuple[StageMemory, ...]:
    stages, groups = experiment.parallel.pipeline_model_parallel_size, communicators(experiment, shape)
    return tuple(
        memory_of_stage(experiment, stage, shape, gpu, correction, groups, attention) for stage in range(stages)
    )


_MIB: Final = 2**20
CONTEXT_BYTES: Final = (500 * _MIB, 1200 * _MIB)
"""CUDA's context and the kernels of PyTorch and its libraries: loaded lazily (CUDA_MODULE_LOADING), or all at once,
as before CUDA 11.7."""
WORKSPACE_BYTES: Final = (8 * _MIB, 64 * _MIB)
"""cuBLAS's workspaces: 8 MiB for a handle and stream, 32 MiB on Hopper (PyTorch, CUBLAS_WORKSPACE_CONFIG). The
forward and the backward thread have one each."""
COMMUNICATOR_BYTES: Final = (150 * _MIB, 500 * _MIB)
"""NCCL's memory for each group of a rank: 10 MiB a connection (NCCL_BUFFSIZE's 4 MiB, and those of LL128 and LL), one
for each of 16 channels' ring, or three with the trees' across nodes."""
EXCHANGE_BYTES: Final = 448 * _MIB
"""NCCL's memory of an all-to-all for each other rank on the node: 32 channels of 10 MiB, and 2 MiB for each way. With
eight H100 one took 3.28 GB (NVIDIA/nccl, issue 1685)."""
_EXCHANGING: Final = 8
"""Ranks of a node with which this was seen; a larger NVLink domain counts as if it had as many."""
FRAGMENTED: Final = 0.25
"""Share of a step's temporary tensors that torch's allocator may hold in addition: no run estimated at 80 % of its
GPU ran out (Fujii et al., 2024), so the real peak is at most a quarter above the tensors."""


def communicators(experiment: Experiment, shape: Shape) -> int:
    """Returns the number of a rank's NCCL communicators: those of the layout, of a stage and its neighbor, of the model
    (for the norm), and of the world."""
    parallel = experiment.parallel
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size > 1
    return (
        1 + split + (parallel.pipeline_model_parallel_size > 1) + len(engine_of(experiment).traffic(experiment, shape))
    )


def exchanging_ranks(experiment: Experiment, shape: Shape) -> int:
    """Returns the ranks of a node that send each other tokens for their experts; 1 if none do."""
    parallel = experiment.parallel
    return min(parallel.expert_model_parallel_size, max(1, shape.slots // parallel.expert_tensor_size), _EXCHANGING)


def overhead_terms(count: int, used: Sequence[Term], limit_bytes: int, exchanging: int = 1) -> list[Term]:
    """Returns the overhead besides the ``used`` terms, on a GPU of ``limit_bytes``, with ``count`` communicators, one
    of which is an all-to-all among ``exchanging`` ranks of the node."""
    temporary = sum(term.bytes for term in used if term.name not in _PERSISTENT)
    low, high = COMMUNICATOR_BYTES
    more = max(0, (exchanging - 1) * EXCHANGE_BYTES - high)
    exchange = f"; {more // _MIB} MiB more for an all-to-all" if more else ""
    wanted = (
        (
            "CUDA context",
            CONTEXT_BYTES[0] + WORKSPACE_BYTES[0],
            CONTEXT_BYTES[1] + WORKSPACE_BYTES[1],
            "context, kernels, cuBLAS's workspaces",
        ),
        (
            "NCCL",
            count * low,
            count * high + more,
            f"{count} communicators x {low // _MIB} to {high // _MIB} MiB{exchange}",
        ),
        ("fragmentation", 0, round(FRAGMENTED * temporary), f"up to {FRAGMENTED:.0%} of what comes and goes in a step"),
    )
    # A run that fits with the least of each overhead never exceeds the GPU's memory.
    room = max(0, limit_bytes - total_bytes(used) - sum(least for _, least, _, _ in wanted))
    terms = []
    for name, least, most, source in wanted:
        extra = min(most - least, room)
        room -= extra
        terms.append(Term(name, least + extra, f"fixed overhead: {source}" if least else source, least))
    return terms
