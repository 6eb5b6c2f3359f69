"""Memory of a rank, stage by stage, term by term, compared with its GPU's.

The engine gives the bytes of weights, gradients and optimizer states, and the peak of a step on top of them
(:mod:`~tridock.layout.activations`). A step peaks either in its backward passes or in the optimizer step, never in
both. Before the first step a rank may hold more (``States.startup``): megatron-core's distributed optimizer moves the
weights to a buffer, and ZeRO 3 gathers each tensor.

A GPU rank also uses a varying amount of memory that no tensor of the run accounts for: CUDA's context, NCCL's buffers
for each communicator, and blocks that torch's allocator cannot reuse because a step's temporary tensors have other
sizes. The plan is therefore an interval. A run does not fit if even the lower end exceeds the GPU's memory. It is
tight if the upper end exceeds 80 % of it.

Bytes of each state, by engine and strategy, are in docs/planner.md, taken from the engines' sources and counted on CPU
ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tridock.engines import ENGINES, CostModel, cost_model_of
from tridock.errors import count
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout import Plan
from tridock.layout.activations import AFTER_FORWARD, Attention
from tridock.layout.shape import (
    OVERLAP,
    Device,
    LayoutShape,
    Parameters,
    States,
    Term,
    layers_of_stage,
    least_bytes,
    total_bytes,
)
from tridock.plan.correction import Correction
from tridock.plan.spread import memory_spread

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
    spread: float
    """Upper end of measured memory over :attr:`total_bytes`, of published runs."""

    @property
    def total_bytes(self) -> int:
        return total_bytes(self.terms)

    @property
    def least_bytes(self) -> int:
        """Returns the interval's lower end: the least overhead, and no memory that the allocator merely caches."""
        return least_bytes(self.terms)

    @property
    def most_bytes(self) -> int:
        """Returns what nine of ten published runs of any program stay below, at most the GPU's memory."""
        most = round(self.spread * self.total_bytes)
        return most if self.limit_bytes is None else max(self.total_bytes, min(most, self.limit_bytes))

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
    shape: LayoutShape,
    gpu: Gpu | None,
    correction: Correction | None = None,
    groups: int | None = None,
    attention: Attention = "fused",
) -> StageMemory:
    """Returns all terms of one rank of ``stage``; without a GPU, those of a CPU rank, which has no GPU overhead.
    Raises :class:`RequestError` if the engine has no cost model.

    ``groups``: the communicators of a rank, if known. A run's ``correction`` is a separate term, negative if the run
    took less memory than its plan.
    """
    device: Device = "cpu" if gpu is None else "cuda"
    model = cost_model_of(experiment)
    train = experiment.train
    copies = train.save and train.async_save and train.save_interval > 0
    weights = model.parameters(experiment, stage)
    states = model.states(experiment, weights, shape, device)
    terms = [*_persistent(states, weights.total), *_temporary(model, experiment, stage, shape, states, gpu, attention)]
    excess = max(0, states.startup - total_bytes(terms))
    terms.append(Term("start-up", excess, "weights that are there twice before the first step"))
    if correction is not None and gpu is not None:
        source = f"{correction.source} allocated {correction.memory:.3g} times what its plan has"
        terms.append(Term("measured by a run", round((correction.memory - 1) * total_bytes(terms)), source))
    if gpu is not None:
        terms += model.gpu_terms(experiment, shape)
        count = communicators(experiment, shape) if groups is None else groups
        terms += overhead_terms(count, terms, gpu.memory_bytes, exchanging_ranks(experiment, shape))
    return StageMemory(
        stage=stage,
        layers=layers_of_stage(experiment, stage),
        parameters=weights,
        terms=tuple(term for term in terms if term.bytes),
        state_bytes=states.persistent + states.step_gradients,
        startup_bytes=states.startup,
        copied_bytes=model.copied_bytes(experiment, weights, states) if copies else 0,
        offloaded_bytes=states.offloaded + states.host_buffers,
        locked_bytes=states.locked,
        nvme_bytes=states.swapped + states.swap_buffers,
        limit_bytes=None if gpu is None else gpu.memory_bytes,
        spread=1.0 if correction is not None else memory_spread(described=experiment.program is not None).high,
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
    model: CostModel,
    experiment: Experiment,
    stage: int,
    shape: LayoutShape,
    states: States,
    gpu: Gpu | None,
    attention: Attention,
) -> Iterator[Term]:
    """Yields the temporary memory of a step: of its backward passes or, if larger, of the optimizer step."""
    device: Device = "cpu" if gpu is None else "cuda"
    terms = model.activation_terms(experiment, stage, shape.accumulation, gpu, attention)
    yield from terms
    yield Term("gathered weights", states.gathered, "ZeRO 3: 1e9 and a tensor; FSDP2: embeddings and last norm")
    later = sum(term.bytes for term in terms if term.name in AFTER_FORWARD)
    beside = max(0, states.prefetch - later)
    yield Term("prefetched weights", beside, "ZeRO 3: stage3_prefetch_bucket_size and a tensor, in the forward pass")
    yield Term("gradient bucket", states.bucket, "DeepSpeed's reduce_bucket_size, 5e8 elements")
    backward = total_bytes(terms) + states.gathered + beside + states.bucket
    accumulated = model.accumulated_gradients(experiment, stage, shape, states, device, total_bytes(terms))
    yield Term("gradients of a step", accumulated, "from the first backward pass to the optimizer's step")
    excess = max(0, states.step_gradients - accumulated + states.workspace - backward)
    yield Term("optimizer's step", excess, "its gradients and workspace, beyond the room of the above")


def memory_of_stages(
    experiment: Experiment,
    shape: LayoutShape,
    gpu: Gpu | None,
    correction: Correction | None = None,
    attention: Attention = "fused",
) -> tuple[StageMemory, ...]:
    """Returns the memory of every stage; nothing if the engine has no cost model."""
    if ENGINES[experiment.engine].cost_model is None:
        return ()
    stages, groups = experiment.parallel.pipeline_model_parallel_size, communicators(experiment, shape)
    return tuple(
        memory_of_stage(experiment, stage, shape, gpu, correction, groups, attention) for stage in range(stages)
    )


_MIB: Final = 2**20
CONTEXT_BYTES: Final = ((500 + 8) * _MIB, (1200 + 64) * _MIB)
"""CUDA's context and the kernels of PyTorch and its libraries: loaded lazily (CUDA_MODULE_LOADING), or all at once,
as before CUDA 11.7; and cuBLAS's workspaces: 8 MiB for a handle and stream, 32 MiB on Hopper (PyTorch,
CUBLAS_WORKSPACE_CONFIG). The forward and the backward thread have one each."""
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


def communicators(experiment: Experiment, shape: LayoutShape) -> int:
    """Returns the number of a rank's NCCL communicators: those of the layout, of a stage and its neighbor, of the model
    (for the norm), and of the world."""
    parallel = experiment.parallel
    groups = cost_model_of(experiment).traffic(experiment, shape)
    return 1 + parallel.splits_model + (parallel.pipeline_model_parallel_size > 1) + len(groups)


def exchanging_ranks(experiment: Experiment, shape: LayoutShape) -> int:
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
    groups = f"{count} communicators x {low // _MIB} to {high // _MIB} MiB{exchange}"
    wanted = (
        ("CUDA context", CONTEXT_BYTES[0], CONTEXT_BYTES[1], "context, kernels, cuBLAS's workspaces"),
        ("NCCL", count * low, count * high + more, groups),
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


_ANY_GPU: Final = Gpu("any", memory_mib=1)
"""What is offloaded does not depend on the GPU."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one node's host, besides what programs need themselves."""

    ranks: int
    least: int
    """Offloaded weights and optimizer states, and their buffers."""
    most: int
    """And a copy of a checkpoint that is written in the background."""
    locked: int = 0
    """Memory that one rank locks for transfers to NVMe."""
    nvme: int = 0
    """Bytes on the node's NVMe."""

    def __str__(self) -> str:
        size = f"{self.least / GIB:.1f}" + (f" to {self.most / GIB:.1f}" if self.most > self.least else "")
        nvme = f", and {self.nvme / GIB:.1f} GiB on NVMe" if self.nvme else ""
        return f"{count(self.ranks, 'rank')} of a node need {size} GiB of its host's memory{nvme}"


def host_memory(plan: Plan, memory: Sequence[StageMemory]) -> dict[str, HostMemory]:
    """Returns the memory by node; empty if no rank offloads anything."""
    if not any(stage.offloaded_bytes for stage in memory):
        return {}
    found: dict[str, HostMemory] = {}
    for rank in plan.ranks:
        stage, before = memory[rank.pipeline_parallel_rank], found.get(rank.node, HostMemory(0, 0, 0))
        least = stage.offloaded_bytes
        found[rank.node] = HostMemory(
            before.ranks + 1,
            before.least + least,
            before.most + least + stage.copied_bytes,
            max(before.locked, stage.locked_bytes),
            before.nvme + stage.nvme_bytes,
        )
    return found


def host_memory_of(experiment: Experiment, plan: Plan) -> dict[str, HostMemory]:
    """Returns the memory by node of an experiment that was laid out."""
    slots = min(Counter(rank.node for rank in plan.ranks).values())
    shape = LayoutShape(plan.data_parallel_size, plan.accumulation_steps, slots)
    return host_memory(plan, memory_of_stages(experiment, shape, _ANY_GPU))
