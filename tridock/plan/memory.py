"""Memory of a rank, stage by stage, term by term, against what its GPU has.

The engine gives what it keeps of weights, gradients and optimizer, and what a step holds on top of that
(:mod:`~tridock.layout.activations`). A step holds most either in its backward passes or while the optimizer works,
never in both. Before the first step a rank may hold more than that (``States.startup``): no strategy of engine torch,
but megatron-core's distributed optimizer moves the weights to a buffer, and ZeRO 3 of v1.1.5 begins with whole weights.

A GPU rank also uses memory that no tensor of the run accounts for, more or less of it: CUDA's context, NCCL's buffers
for each communicator, and blocks that torch's allocator cannot use because what comes and goes in a step has other
sizes. So the plan is an interval: a run does not fit where even the lower end is more than the GPU has, and is called
tight where the upper end is more than 80 % of it.

Bytes a weight of the states, in fp16 and bf16 (e: the format's 2; in fp32 4, without a master copy but where noted);
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

Read in the engines' sources and counted on CPU ranks (docs/planner.md). DeepSpeed's ZeRO 1 to 3 reduce gradients
through a bucket of 5e8 elements, which is there whole; ZeRO 3 holds up to 1e9 gathered weights, and keeps those of
less than 1e5 elements whole. FSDP2 sums the gradients of several micro-batches up whole, in fp32, before it scatters
them (:mod:`~tridock.engines.torch.fsdp`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tridock.engines import engine_of
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.shape import Device, Parameters, Shape, States, Term, layers_of_stage, least_bytes, total_bytes
from tridock.plan.correction import Correction

Fit = Literal["fits", "tight", "no-fit"]
TIGHT: Final = 0.8
"""Share of a GPU above which a run may not last: of 454 published runs none that was estimated below it ran out
(Fujii et al., 2024, arXiv 2411.06465)."""
GIB: Final = 2**30
_LASTING: Final = ("weights", "gradients", "optimizer states", "start-up")
"""Terms that do not come and go in each step."""
_OVERHEAD: Final = ("CUDA context", "NCCL", "fragmentation")
"""Terms that no tensor accounts for."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one rank of a pipeline stage."""

    stage: int
    layers: int
    parameters: Parameters
    terms: tuple[Term, ...]
    state_bytes: int
    """Weights, gradients and optimizer states: the terms that last from step to step."""
    startup_bytes: int
    """The most that it holds before its first step; included in the terms where that is more than a step takes."""
    copied_bytes: int
    """Memory of its host, not of its GPU, at most: the copy that is written as a checkpoint in the background."""
    offloaded_bytes: int
    """Memory of its host, too: weights and optimizer states that it keeps in place of its GPU, and their buffers."""
    limit_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return total_bytes(self.terms)

    @property
    def least_bytes(self) -> int:
        """The interval's lower end: with the least overhead, and nothing that the allocator merely keeps."""
        return least_bytes(self.terms)

    @property
    def share(self) -> float | None:
        """Of the GPU's memory, at most; None where that is not known."""
        return None if self.limit_bytes is None else self.total_bytes / self.limit_bytes

    @property
    def fit(self) -> Fit:
        """Whether a GPU holds it; one of unknown size is taken to."""
        if self.limit_bytes is None or self.total_bytes <= TIGHT * self.limit_bytes:
            return "fits"
        return "tight" if self.least_bytes <= self.limit_bytes else "no-fit"


def tensor_bytes(terms: Iterable[Term]) -> int:
    """What torch allocates at most."""
    return total_bytes(term for term in terms if term.name not in _OVERHEAD)


def memory_of_stage(
    experiment: Experiment,
    stage: int,
    shape: Shape,
    gpu: Gpu | None,
    correction: Correction | None = None,
    groups: int | None = None,
) -> StageMemory:
    """All terms of one rank of ``stage``; without a GPU, those of a CPU rank, which has no overhead of a GPU.

    ``groups``: the communicators of a rank, where they are known. A run's ``correction`` is a term of its own, below
    zero where the run took less than its plan.
    """
    device: Device = "cpu" if gpu is None else "cuda"
    train = experiment.train
    copies = train.save and train.async_save and train.save_interval > 0
    weights = engine_of(experiment).parameters(experiment, stage)
    states = engine_of(experiment).states(experiment, weights, shape, device)
    terms = [*_lasting(states, weights.total), *_passing(experiment, stage, shape, states, device)]
    beyond = max(0, states.startup - total_bytes(terms))
    terms.append(Term("start-up", beyond, "weights that are there twice, or whole, before the first step"))
    if correction is not None and gpu is not None:
        source = f"{correction.source} allocated {correction.memory:.3g} times what its plan has"
        terms.append(Term("measured by a run", round((correction.memory - 1) * total_bytes(terms)), source))
    if gpu is not None:
        count = communicators(experiment, shape) if groups is None else groups
        terms += overhead_terms(count, terms, gpu.memory_bytes)
    return StageMemory(
        stage=stage,
        layers=layers_of_stage(experiment, stage),
        parameters=weights,
        terms=tuple(term for term in terms if term.bytes),
        state_bytes=states.lasting + states.passing,
        startup_bytes=states.startup,
        copied_bytes=engine_of(experiment).copied_bytes(experiment, weights, states) if copies else 0,
        offloaded_bytes=states.offloaded + states.host_buffers,
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
    held = engine_of(experiment).activation_terms(experiment, stage, shape.accumulation, device)
    yield from held
    yield Term(
        "gathered weights", states.gathered, "ZeRO 3: up to 1e9 of them at a time; FSDP2: embeddings and last norm"
    )
    yield Term("gradient bucket", states.bucket, "DeepSpeed's reduce_bucket_size, 5e8 elements")
    backward = total_bytes(held) + states.gathered + states.bucket
    engine, activations = engine_of(experiment), total_bytes(held)
    accumulated = engine.accumulated_gradients(experiment, stage, shape, states, device, activations)
    yield Term("gradients of a step", accumulated, "from the first backward pass to the optimizer's step")
    beyond = max(0, states.passing - accumulated + states.workspace - backward)
    yield Term("optimizer's step", beyond, "its gradients and workspace, beyond the room of the above")


def memory_of_stages(
    experiment: Experiment, shape: Shape, gpu: Gpu | None, correction: Correction | None = None
) -> tuple[StageMemory, ...]:
    stages, groups = experiment.parallel.pipeline_model_parallel_size, communicators(experiment, shape)
    return tuple(memory_of_stage(experiment, stage, shape, gpu, correction, groups) for stage in range(stages))


_MIB: Final = 2**20
CONTEXT_BYTES: Final = (500 * _MIB, 1200 * _MIB)
"""CUDA's context and the kernels of PyTorch and its libraries: loaded as they are needed (CUDA_MODULE_LOADING), or
all at once, as before CUDA 11.7."""
WORKSPACE_BYTES: Final = (8 * _MIB, 64 * _MIB)
"""cuBLAS's workspaces: 8 MiB for a handle and stream, 32 MiB on Hopper (PyTorch, CUBLAS_WORKSPACE_CONFIG), of which the
forward and the backward thread each have one."""
COMMUNICATOR_BYTES: Final = (150 * _MIB, 500 * _MIB)
"""NCCL, for each group that a rank is in: 10 MiB a connection (NCCL_BUFFSIZE's 4 MiB, and those of LL128 and LL), one
for each of 16 channels' ring, or three with the trees' across nodes."""
FRAGMENTED: Final = 0.25
"""Share of what comes and goes in a step that torch's allocator may hold on top: no run estimated at 80 % of its GPU
ran out (Fujii et al., 2024), so reality is at most a quarter above what tensors take."""


def communicators(experiment: Experiment, shape: Shape) -> int:
    """NCCL's groups that a rank takes part in: those of the layout, a stage and its neighbor, the model's (for the
    norm), and the world's."""
    parallel = experiment.parallel
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size > 1
    return (
        1 + split + (parallel.pipeline_model_parallel_size > 1) + len(engine_of(experiment).traffic(experiment, shape))
    )


def overhead_terms(count: int, used: Sequence[Term], limit_bytes: int) -> list[Term]:
    """On top of what is ``used``, on a GPU of ``limit_bytes``, with that many communicators."""
    passing = sum(term.bytes for term in used if term.name not in _LASTING)
    low, high = COMMUNICATOR_BYTES
    wanted = (
        (
            "CUDA context",
            CONTEXT_BYTES[0] + WORKSPACE_BYTES[0],
            CONTEXT_BYTES[1] + WORKSPACE_BYTES[1],
            "context, kernels, cuBLAS's workspaces",
        ),
        ("NCCL", count * low, count * high, f"{count} communicators x {low // _MIB} to {high // _MIB} MiB"),
        ("fragmentation", 0, round(FRAGMENTED * passing), f"up to {FRAGMENTED:.0%} of what comes and goes in a step"),
    )
    # A run that the GPU holds with the least of each does not take more than the GPU has.
    room = max(0, limit_bytes - total_bytes(used) - sum(least for _, least, _, _ in wanted))
    terms = []
    for name, least, most, source in wanted:
        more = min(most - least, room)
        room -= more
        terms.append(Term(name, least + more, f"fixed overhead: {source}" if least else source, least))
    return terms
