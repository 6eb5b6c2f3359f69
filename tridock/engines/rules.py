"""The rules of an engine: which fields, layouts and batches it accepts, and the layouts that a search tries. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from tridock.engines.fields import Fields
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.shape import vocab_size
from tridock.layout.split import either, nearest_multiples

Choice = Mapping[str, object]
"""Field paths with values, as ``--set`` takes them."""


class Rules(ABC):
    """What an engine accepts. An engine must say what it does with each field, and what it cannot run."""

    fields: ClassVar[Fields]
    trains_images: ClassVar[bool] = False

    @abstractmethod
    def problems(self, experiment: Experiment) -> Iterator[Problem]:
        """Yields what the engine cannot run on any number of ranks, except refused fields."""

    def takes_sizes(self, experiment: Experiment) -> bool:
        """Returns whether it supports the tensor, pipeline and context parallel sizes, regardless of other problems."""
        return not any(self.problems(experiment))

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        """Yields global batches that ``replicas`` cannot process, and other problems of this number of replicas."""
        per_pass = experiment.batch.micro_batch_size * replicas
        samples = experiment.batch.samples_per_step(replicas)
        if samples % per_pass:
            near = nearest_multiples(per_pass, samples)
            yield uneven_batch(experiment, replicas, f"use {either(near)}, or leave it out", near)

    def node_problems(self, experiment: Experiment, slots: int) -> Iterator[Problem]:
        """Yields requested features that nodes of ``slots`` do not have."""
        yield from ()

    def gpu_problems(self, experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:
        """Yields requested features that this GPU lacks."""
        yield from ()

    def padded_vocab_size(self, tokens: int, experiment: Experiment) -> int:
        """Returns the token table's rows for ``tokens``: a multiple of Megatron's that tensor parallel ranks split."""
        multiple = experiment.model.make_vocab_size_divisible_by * experiment.parallel.tensor_model_parallel_size
        return -(-tokens // multiple) * multiple

    def rows_of_vocabulary(self, experiment: Experiment) -> int:
        """Returns the rows of the token table, including padding, over all tensor parallel ranks."""
        return self.padded_vocab_size(vocab_size(experiment), experiment)

    # Layouts that `tridock plan --search` and a run without a lost node try

    def splits_model(self, experiment: Experiment) -> bool:
        """Returns whether the search varies the tensor and pipeline parallel sizes."""
        return True

    def context_sizes(self, experiment: Experiment) -> tuple[int, ...]:
        """Returns the context parallel sizes that the search tries."""
        return (experiment.parallel.context_parallel_size,)

    def layout_choices(self, experiment: Experiment, tensor: int, stages: int) -> Iterator[Choice]:
        """Yields the options for these sizes, besides the partition of the states."""
        yield {}

    def state_choices(self, experiment: Experiment, stages: int) -> Iterator[Choice]:
        """Yields the ways to partition the optimizer states."""
        if experiment.parallel.strategy != "zero":
            yield {}
        else:
            yield from ({"parallel.zero_stage": stage} for stage in ((0, 1) if stages > 1 else (0, 1, 2, 3)))

    def offload_choices(self, experiment: Experiment) -> Iterator[Choice]:
        """Yields the ways to keep states in the host's memory, which the search tries if nothing fits without."""
        yield from ()

    def recompute_choices(self) -> tuple[Choice, ...]:
        """Returns the ways to recompute activations."""
        return ({},)

    def partial_recompute_choices(self, experiment: Experiment) -> tuple[Choice, ...]:
        """Returns, for an experiment that recomputes all layers, the ways to recompute fewer, the fewest first."""
        return ()

    def is_repeated(self, choice: Choice, replicas: int, accumulation: int) -> bool:
        """Returns whether another choice is equivalent with this many replicas and micro batches."""
        return False


def uneven_batch(experiment: Experiment, replicas: int, todo: str, near: tuple[int, ...]) -> Problem:
    sizes = f"micro_batch_size {experiment.batch.micro_batch_size} x data parallel size {replicas}"
    got = str(experiment.batch.samples_per_step(replicas))
    return Problem("batch.global_batch_size", f"must be a multiple of {sizes}", got, todo, near)
