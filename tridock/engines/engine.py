"""The interface of an engine: one :class:`Engine` for each name of ``engine:`` in an experiment. Pure."""

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tridock.contracts import run_folder
from tridock.engines.fields import Fields
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout import Plan
from tridock.layout.activations import (
    Attention,
    Sizes,
    activation_terms,
    backward_peak,
    head_bytes,
    with_scores,
    with_stepwise_norms,
)
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    HostWork,
    Parameters,
    Shape,
    States,
    Term,
    in_flight,
    parameters_of_stage,
    unlike_stages,
    vocab_size,
)
from tridock.layout.split import either, nearest_multiples
from tridock.layout.traffic import Sent, Traffic, traffic_of_stage

Choice = Mapping[str, object]
"""Field paths with values, as ``--set`` takes them."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """``python -m module *arguments`` with ``env``, and the files that it reads from the run's folder."""

    module: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


class Engine(ABC):
    """One engine: its fields, legality, memory, traffic, search axes, rank program and checkpoints."""

    name: ClassVar[str]
    fields: ClassVar[Fields]
    trains_images: ClassVar[bool] = False
    has_plain_loop: ClassVar[bool] = False
    """Whether ``tridock bench`` can compare it with a plain PyTorch loop."""
    tokenizer_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of ``data`` that name the tokenizer files, which every rank reads."""
    chunks_loss: ClassVar[bool] = True
    """Whether the loss converts logits to fp32 in chunks instead of all at once."""
    prints_timers: ClassVar[bool] = False
    """Whether the first rank logs the phases of a step, as Megatron-LM's timers do."""
    checkpoints_load_on: ClassVar[Literal["any layout", "other replicas", "same layout"]]
    resumes_formats: ClassVar[frozenset[str]] = frozenset()
    """Other programs' formats (``FORMAT`` of ``train.load: FORMAT:DIR``) of checkpoints that a run resumes from."""
    checkpoint_fields: ClassVar[tuple[str, ...]] = ()
    """Fields, besides model and strategy, in which a checkpoint must match the experiment to be loaded."""

    # Legality

    @abstractmethod
    def problems(self, experiment: Experiment) -> Iterator[Problem]:
        """Yields what the engine cannot run on any number of ranks, except refused fields."""

    @abstractmethod
    def takes_sizes(self, experiment: Experiment) -> bool:
        """Returns whether it supports the tensor, pipeline and context parallel sizes, regardless of other problems."""

    def gpu_problems(self, experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:  # noqa: ARG002  of some engines
        """Yields requested features that this GPU lacks."""
        yield from ()

    def node_problems(self, experiment: Experiment, slots: int) -> Iterator[Problem]:  # noqa: ARG002  of some engines
        """Yields requested features that nodes of ``slots`` do not have."""
        yield from ()

    def needs_multicast(self, experiment: Experiment) -> bool:  # noqa: ARG002  of some engines
        """Returns whether every GPU must have CUDA multicast."""
        return False

    def packages(self, _experiment: Experiment) -> Mapping[str, str]:
        """Returns optional Python packages that every node's image must have, each with the field that needs it."""
        return {}

    def nvme_folders(self, _experiment: Experiment) -> Mapping[str, str]:
        """Returns folders on NVMe that every node must have, each with the field that names it."""
        return {}

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        """Yields global batches that ``replicas`` cannot process, and other problems of this number of replicas."""
        per_pass = experiment.batch.micro_batch_size * replicas
        samples = experiment.batch.samples_per_step(replicas)
        if samples % per_pass:
            near = nearest_multiples(per_pass, samples)
            todo = f"use {either(near)}, or leave it out"
            yield uneven_batch(experiment, replicas, todo, near)

    # Parameters, memory, traffic

    def padded_vocab_size(self, tokens: int, experiment: Experiment) -> int:
        """Returns the rows of the token table for ``tokens``: a multiple of Megatron's that tensor parallel ranks
        split."""
        multiple = experiment.model.make_vocab_size_divisible_by * experiment.parallel.tensor_model_parallel_size
        return -(-tokens // multiple) * multiple

    def rows_of_vocabulary(self, experiment: Experiment) -> int:
        """Returns the rows of the token table, including padding, over all tensor parallel ranks."""
        return self.padded_vocab_size(vocab_size(experiment), experiment)

    def parameters(self, experiment: Experiment, stage: int) -> Parameters:
        return parameters_of_stage(experiment, stage, self.rows_of_vocabulary(experiment))

    @abstractmethod
    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        """Returns the memory of a rank with these weights, between steps and within a step."""

    def copied_bytes(self, _experiment: Experiment, weights: Parameters, states: States) -> int:  # noqa: ARG002  of some engines
        """Returns the host memory of the rank that copies the most while a checkpoint is written in the background."""
        return states.saved

    def checkpoint_bytes(self, experiment: Experiment) -> int:
        """Returns the bytes of the whole model's weights and optimizer states in a checkpoint, each once."""
        alone = {
            "data_parallel_shard_size": None,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
        }
        whole = experiment.model_copy(update={"parallel": experiment.parallel.model_copy(update=alone)})
        tensor, stages = whole.parallel.tensor_model_parallel_size, whole.parallel.pipeline_model_parallel_size
        own = (
            self.states(whole, self.parameters(whole, stage), Shape(1, 1, tensor), "cuda") for stage in range(stages)
        )
        return tensor * sum(states.saved for states in own)

    def host_work(self, _experiment: Experiment, _shape: Shape) -> HostWork:
        """Returns the work on states offloaded to the host's memory, on the fullest rank."""
        return HostWork()

    @abstractmethod
    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        """Returns the tensors of a layer for one micro batch."""

    def head_bytes(self, experiment: Experiment, sizes: Sizes, _accumulation: int) -> float:
        """Returns the bytes of the output layer and the loss, on the last stage."""
        return head_bytes(experiment, sizes, self.rows_of_vocabulary(experiment), chunked=self.chunks_loss)

    def activation_terms(
        self,
        experiment: Experiment,
        stage: int,
        accumulation: int,
        device: Device,
        attention: Attention = "fused",
        *,
        stepwise_norms: bool = False,
    ) -> list[Term]:
        """Returns the activation memory of a step, on a rank of this stage. ``stepwise_norms``: of a torch without an
        RMSNorm kernel."""
        if experiment.model.is_vision:
            return self.image_terms(experiment)
        sizes = self.sizes(experiment, device)
        sizes = with_scores(experiment, sizes) if attention == "unfused" else sizes
        sizes = with_stepwise_norms(experiment, sizes) if stepwise_norms else sizes
        head = self.head_bytes(experiment, sizes, accumulation)
        messages = self.message_bytes(experiment, stage, accumulation, sizes)
        inside = self.backward_peak(experiment, stage, accumulation, sizes)
        terms = activation_terms(experiment, stage, accumulation, sizes, head, inside, messages)
        return [*terms, *self.further_terms(experiment, stage, device)]

    def backward_peak(self, experiment: Experiment, stage: int, _accumulation: int, sizes: Sizes) -> float:
        """Returns the peak of the backward passes of a stage's layers, beyond what they keep. If one rank's embedding
        and output layer have the same weights, autograd keeps the gradient from the output layer, the first, until it
        can add the embedding's, the last (``InputBuffer`` of torch's autograd engine)."""
        tied = not experiment.model.untie_embeddings_and_output_weights
        held = tied and experiment.parallel.pipeline_model_parallel_size == 1
        return backward_peak(experiment, stage, sizes) + (self.table_bytes(experiment, sizes) if held else 0.0)

    def table_bytes(self, experiment: Experiment, sizes: Sizes) -> float:
        """Returns the bytes of a rank's rows of the token table in the format of the matrix products."""
        rows = self.rows_of_vocabulary(experiment) / experiment.parallel.tensor_model_parallel_size
        return rows * experiment.model.hidden_size * sizes.short

    def further_terms(self, _experiment: Experiment, _stage: int, _device: Device) -> list[Term]:
        """Returns what the engine's layers have in memory besides activations, on a rank of this stage."""
        return []

    def image_terms(self, experiment: Experiment) -> list[Term]:
        """Returns the activation memory of a step of an image model; only of an engine that trains them."""
        raise NotImplementedError(experiment.engine)

    def message_bytes(self, experiment: Experiment, stage: int, accumulation: int, sizes: Sizes) -> float:
        """Returns the bytes of a stage's inputs and outputs that its layers do not keep. On a GPU an output is freed
        once it is sent; a CPU rank keeps those in flight."""
        last = stage == experiment.parallel.pipeline_model_parallel_size - 1
        count = in_flight(experiment, stage, accumulation) - last if sizes.device == "cpu" else 2
        return count * sizes.between

    def accumulated_gradients(
        self, _experiment: Experiment, _stage: int, shape: Shape, states: States, _device: Device, _activations: int
    ) -> int:
        """Returns the gradients beyond those at a step's first backward pass. With one micro batch they are allocated
        as activations are freed.

        ``activations``: bytes of the activation terms.
        """
        return states.step_gradients if shape.accumulation > 1 else 0

    def summed_bytes(self, experiment: Experiment) -> float:
        """Returns the bytes read and written of a weight for each micro batch, as its gradient is accumulated."""
        return 3.0 * FORMAT_BYTES[experiment.precision]

    def kernels(self, _experiment: Experiment) -> float:
        """Returns the share of a layer's kernels that are launched one by one."""
        return 1.0

    def fuses_rotation(self, _experiment: Experiment) -> bool:
        """Whether rotary embeddings are one kernel."""
        return False

    def stepwise_norms(self, experiment: Experiment, gpu: Gpu) -> bool:
        """Whether RMSNorm is computed step by step, by the torch of this GPU's base image."""
        return gpu.stepwise_norms and not experiment.train.compile

    def gpu_terms(self, _experiment: Experiment, _shape: Shape) -> list[Term]:
        """Returns memory that a rank has from step to step only on GPUs that support it."""
        return []

    @abstractmethod
    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        """Returns the engine-specific part of what a rank of this stage sends."""

    def traffic_of_stage(self, experiment: Experiment, shape: Shape, stage: int) -> list[Traffic]:
        """Returns the traffic of every group that a rank of this stage shares with other ranks."""
        return traffic_of_stage(experiment, shape, stage, self.sent(experiment, shape, stage))

    def traffic(self, experiment: Experiment, shape: Shape) -> list[Traffic]:
        """Returns the traffic of every group of more than one rank, at the stage that sends the most in it."""
        busiest: dict[str, Traffic] = {}
        for stage in unlike_stages(experiment):
            for one in self.traffic_of_stage(experiment, shape, stage):
                if one.group not in busiest or one.bytes_per_rank > busiest[one.group].bytes_per_rank:
                    busiest[one.group] = one
        return list(busiest.values())

    # Axes of `tridock plan --search`

    def splits_model(self, _experiment: Experiment) -> bool:
        """Returns whether the search varies the tensor and pipeline parallel sizes."""
        return True

    def layout_choices(self, _experiment: Experiment, _tensor: int, _stages: int) -> Iterator[Choice]:
        """Yields the options for these sizes, besides the partition of the states."""
        yield {}

    def state_choices(self, experiment: Experiment, stages: int) -> Iterator[Choice]:
        """Yields the ways to partition the optimizer states."""
        if experiment.parallel.strategy != "zero":
            yield {}
        else:
            yield from ({"parallel.zero_stage": stage} for stage in ((0, 1) if stages > 1 else (0, 1, 2, 3)))

    def offload_choices(self, _experiment: Experiment) -> Iterator[Choice]:
        """Yields the ways to keep states in the host's memory, which the search tries if nothing fits without."""
        yield from ()

    @abstractmethod
    def recompute_choices(self) -> tuple[Choice, ...]:
        """Returns the ways to recompute activations."""

    def partial_recompute_choices(self, _experiment: Experiment) -> tuple[Choice, ...]:
        """Returns, for an experiment that recomputes all layers, the ways to recompute fewer, the fewest first."""
        return ()

    def context_sizes(self, experiment: Experiment) -> tuple[int, ...]:
        """Returns the context parallel sizes that the search tries."""
        return (experiment.parallel.context_parallel_size,)

    def is_repeated(self, _choice: Choice, _replicas: int, _accumulation: int) -> bool:
        """Returns whether another choice is equivalent with this many replicas and micro batches."""
        return False

    # The rank and its checkpoints

    @abstractmethod
    def program(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        """Returns a rank's program; ``env`` adds to the variables of every engine. ``load``: checkpoints to continue
        from."""

    def index_map_program(self, _experiment: Experiment, _plan: Plan, _workspace: str) -> tuple[str, ...] | None:
        """Returns module and arguments that build the samples' index maps; None if the ranks build them in memory."""
        return None

    def checkpoint_strategy(self, experiment: Experiment) -> str:
        """Returns the strategy of the checkpoints that the experiment loads and writes."""
        return experiment.parallel.strategy

    def splits_checkpoint_by_rank(self, _experiment: Experiment) -> bool:
        """Returns whether a checkpoint has one file for every rank, and loads only with all of them."""
        return False

    def checkpoint_problems(
        self, _experiment: Experiment, _data_parallel_size: int, _written: Mapping[str, Any] | None
    ) -> Iterator[Problem]:
        """Yields the problems of the checkpoint of ``train.load``; ``written``: the layout beside it, if any."""
        yield from ()


def uneven_batch(experiment: Experiment, replicas: int, todo: str, near: tuple[int, ...]) -> Problem:
    sizes = f"micro_batch_size {experiment.batch.micro_batch_size} x data parallel size {replicas}"
    got = str(experiment.batch.samples_per_step(replicas))
    return Problem("batch.global_batch_size", f"must be a multiple of {sizes}", got, todo, near)


def checkpoints_folder(experiment: Experiment, run_path: str) -> str:
    """Returns the absolute path of the run's checkpoints."""
    workspace = posixpath.dirname(posixpath.dirname(run_path))
    return posixpath.join(workspace, experiment.train.checkpoint_folder or f"{run_path}/{run_folder.CHECKPOINTS}")
