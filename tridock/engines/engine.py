"""What Tridock asks of an engine: one :class:`Engine` for each name of ``engine:`` in an experiment. Pure."""

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tridock.contracts import run_folder
from tridock.engines.fields import Fields
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout import Plan
from tridock.layout.activations import Sizes, activation_terms, head_bytes
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
    vocab_size,
)
from tridock.layout.split import either, nearest_multiples
from tridock.layout.traffic import Sent, Traffic, traffic_of_stage

Choice = Mapping[str, object]
"""Fields by their paths, as ``--set`` takes them."""


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
    """Fields of ``data`` that name the tokenizer files which every rank reads."""
    chunks_loss: ClassVar[bool] = True
    """Whether the loss takes logits to fp32 in chunks, not whole."""
    prints_timers: ClassVar[bool] = False
    """Whether the first rank's log has the phases of a step, as Megatron-LM prints its timers."""
    checkpoints_load_on: ClassVar[Literal["any layout", "other replicas", "same layout"]]
    checkpoint_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the experiment, beside model and strategy, that a checkpoint must agree on to be loaded."""

    # Legality

    @abstractmethod
    def problems(self, experiment: Experiment) -> Iterator[Problem]:
        """What the engine cannot run, whatever the number of ranks; refused fields aside."""

    @abstractmethod
    def takes_sizes(self, experiment: Experiment) -> bool:
        """Whether it runs these tensor, pipeline and context parallel sizes, whatever stands against the rest."""

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        """Global batches that so many replicas cannot work through, and what else their number stands against."""
        per_pass = experiment.batch.micro_batch_size * replicas
        samples = experiment.batch.samples_per_step(replicas)
        if samples % per_pass:
            near = nearest_multiples(per_pass, samples)
            todo = f"use {either(near)}, or leave it out"
            yield uneven_batch(experiment, replicas, todo, near)

    # Parameters, memory, traffic

    def padded_vocab_size(self, tokens: int, experiment: Experiment) -> int:
        """Rows of the token table for that many tokens: Megatron's multiple, for the tensor parallel ranks to share."""
        multiple = experiment.model.make_vocab_size_divisible_by * experiment.parallel.tensor_model_parallel_size
        return -(-tokens // multiple) * multiple

    def rows_of_vocabulary(self, experiment: Experiment) -> int:
        """Rows of the token table, the padding included, over all tensor parallel ranks."""
        return self.padded_vocab_size(vocab_size(experiment), experiment)

    def parameters(self, experiment: Experiment, stage: int) -> Parameters:
        return parameters_of_stage(experiment, stage, self.rows_of_vocabulary(experiment))

    @abstractmethod
    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        """What a rank with these weights keeps from step to step, and in one."""

    def copied_bytes(self, _experiment: Experiment, weights: Parameters, states: States) -> int:  # noqa: ARG002  of some engines
        """What the rank that copies the most holds on its host while a checkpoint is written in the background."""
        return states.saved

    def checkpoint_bytes(self, experiment: Experiment) -> int:
        """Weights and optimizer states of the whole model, as a checkpoint holds them: each once."""
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
        """Of states that are offloaded to the host's memory, on the fullest rank."""
        return HostWork()

    @abstractmethod
    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        """The tensors of a layer for one micro batch."""

    def head_bytes(self, experiment: Experiment, sizes: Sizes, _runs_in_flight: int) -> float:
        """The output layer and the loss, on the last stage."""
        return head_bytes(experiment, sizes, self.rows_of_vocabulary(experiment), chunked=self.chunks_loss)

    def activation_terms(self, experiment: Experiment, stage: int, accumulation: int, device: Device) -> list[Term]:
        """What a step holds for its backward passes, on a rank of this stage."""
        sizes = self.sizes(experiment, device)
        head = self.head_bytes(experiment, sizes, in_flight(experiment, stage, accumulation))
        return activation_terms(experiment, stage, accumulation, sizes, head)

    def accumulated_gradients(
        self, _experiment: Experiment, _stage: int, shape: Shape, states: States, _device: Device, _activations: int
    ) -> int:
        """Gradients on top of what a step's first backward pass finds: with a single one they grow as activations go.

        ``activations``: bytes of the activation terms.
        """
        return states.passing if shape.accumulation > 1 else 0

    def summed_bytes(self, experiment: Experiment) -> float:
        """Bytes of a weight that are read and written for each micro batch, as its gradient is added to the others."""
        return 3.0 * FORMAT_BYTES[experiment.precision]

    def kernels(self, _experiment: Experiment) -> float:
        """Share of a layer's kernels that are started one by one."""
        return 1.0

    @abstractmethod
    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        """What a rank of this stage sends that depends on the engine."""

    def traffic_of_stage(self, experiment: Experiment, shape: Shape, stage: int) -> list[Traffic]:
        """Of every group that a rank of this stage shares with others."""
        return traffic_of_stage(experiment, shape, stage, self.sent(experiment, shape, stage))

    def traffic(self, experiment: Experiment, shape: Shape) -> list[Traffic]:
        """Of every group that has more than one rank, on the stage that sends most in it."""
        last = experiment.parallel.pipeline_model_parallel_size - 1
        busiest: dict[str, Traffic] = {}
        for stage in sorted({0, min(1, last), last}):  # those in between are like the second, or have a layer less
            for one in self.traffic_of_stage(experiment, shape, stage):
                if one.group not in busiest or one.bytes_per_rank > busiest[one.group].bytes_per_rank:
                    busiest[one.group] = one
        return list(busiest.values())

    # Axes of `tridock plan --search`

    def splits_model(self, _experiment: Experiment) -> bool:
        """Whether tensor and pipeline parallel sizes are worth a try."""
        return True

    def layout_choices(self, _experiment: Experiment, _tensor: int, _stages: int) -> Iterator[Choice]:
        """What goes with these sizes beside the states' partition."""
        yield {}

    def state_choices(self, experiment: Experiment, stages: int) -> Iterator[Choice]:
        """Ways to partition the optimizer's states."""
        if experiment.parallel.strategy != "zero":
            yield {}
        else:
            yield from ({"parallel.zero_stage": stage} for stage in ((0, 1) if stages > 1 else (0, 1, 2, 3)))

    @abstractmethod
    def recompute_choices(self) -> tuple[Choice, ...]:
        """Ways to recompute activations."""

    def partial_recompute_choices(self, _experiment: Experiment) -> tuple[Choice, ...]:
        """Of an experiment that recomputes all layers: ways to recompute fewer, the fewest first."""
        return ()

    def context_sizes(self, experiment: Experiment) -> tuple[int, ...]:
        """Context parallel sizes that are worth a try."""
        return (experiment.parallel.context_parallel_size,)

    def is_repeated(self, _choice: Choice, _replicas: int, _accumulation: int) -> bool:
        """Whether another choice does the same with so many replicas and micro batches."""
        return False

    # The rank and its checkpoints

    @abstractmethod
    def program(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        """What a rank executes; ``env`` beside what every engine's has. ``load``: checkpoints to continue from."""

    def index_map_program(self, _experiment: Experiment, _plan: Plan, _workspace: str) -> tuple[str, ...] | None:
        """Module and arguments that make the index maps of the samples; None where the ranks find them in memory."""
        return None

    def checkpoint_strategy(self, experiment: Experiment) -> str:
        """The strategy whose checkpoints the experiment loads and writes."""
        return experiment.parallel.strategy

    def splits_checkpoint_by_rank(self, _experiment: Experiment) -> bool:
        """Whether a checkpoint holds a file of every rank, all of which it takes to load it."""
        return False

    def checkpoint_problems(
        self, _experiment: Experiment, _data_parallel_size: int, _written: Mapping[str, Any] | None
    ) -> Iterator[Problem]:
        """What stands against the checkpoint of ``train.load``; ``written``: the layout beside it, if any."""
        yield from ()


def uneven_batch(experiment: Experiment, replicas: int, todo: str, near: tuple[int, ...]) -> Problem:
    sizes = f"micro_batch_size {experiment.batch.micro_batch_size} x data parallel size {replicas}"
    got = str(experiment.batch.samples_per_step(replicas))
    return Problem("batch.global_batch_size", f"must be a multiple of {sizes}", got, todo, near)


def checkpoints_folder(experiment: Experiment, run_path: str) -> str:
    """Where the run's checkpoints go, as an absolute path."""
    workspace = posixpath.dirname(posixpath.dirname(run_path))
    return posixpath.join(workspace, experiment.train.checkpoint_folder or f"{run_path}/{run_folder.CHECKPOINTS}")
