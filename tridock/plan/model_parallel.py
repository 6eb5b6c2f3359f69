"""How a model may be split over ranks, whichever Megatron does it."""

from __future__ import annotations

from collections.abc import Iterator

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.plan.nearest import either, nearest_divisors


def split_problems(experiment: Experiment) -> Iterator[Problem]:
    """Heads that tensor parallel ranks, and layers that stages, cannot share out evenly."""
    model, parallel = experiment.model, experiment.parallel
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if model.num_attention_heads % tensor:
        yield Problem(
            "parallel.tensor_model_parallel_size",
            f"must divide num_attention_heads {model.num_attention_heads}",
            str(tensor),
            f"use {either(nearest_divisors(model.num_attention_heads, tensor))}",
        )
    if model.num_layers % stages:
        yield Problem(
            "parallel.pipeline_model_parallel_size",
            f"must divide num_layers {model.num_layers}",
            str(stages),
            f"use {either(nearest_divisors(model.num_layers, stages))}",
        )


def size_of_replica(experiment: Experiment) -> int:
    """Ranks that work on the same samples."""
    parallel = experiment.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
