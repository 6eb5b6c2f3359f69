"""How a model may be split over ranks, whichever Megatron does it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout.nearest import around, divisors, either, nearest_divisors, nearest_multiple


def split_problems(experiment: Experiment) -> Iterator[Problem]:
    """Heads that tensor parallel ranks, and layers that stages, cannot share out.

    megatron-core wants as many layers on every stage. The pipeline of Megatron v1.1.5, which is DeepSpeed's, does not,
    but it breaks where a stage has none; nor does engine torch's.
    """
    model, parallel = experiment.model, experiment.parallel
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if model.num_attention_heads % tensor:
        near = nearest_divisors(model.num_attention_heads, tensor)
        what = f"must divide num_attention_heads {model.num_attention_heads}"
        yield Problem("parallel.tensor_model_parallel_size", what, str(tensor), f"use {either(near)}", near)
    where = "parallel.pipeline_model_parallel_size"
    if experiment.engine == "megatron-core" and model.num_layers % stages:
        near = nearest_divisors(model.num_layers, stages)
        layers = nearest_multiple(stages * parallel.virtual_pipeline_model_parallel_size, model.num_layers)
        todo = f"use {either(near)}, or num_layers {layers}"
        yield Problem(where, f"must divide num_layers {model.num_layers}", str(stages), todo, near)
    elif (experiment.engine == "torch" or parallel.strategy == "zero") and model.num_layers < stages:
        what, todo = f"must be at most num_layers {model.num_layers}", f"use {model.num_layers} or fewer"
        yield Problem(where, what, str(stages), todo, (model.num_layers,))


def world_problems(experiment: Experiment, world_size: int) -> Iterator[Problem]:
    """Slots that whole replicas of the model do not fill."""
    size = size_of_replica(experiment)
    if world_size % size == 0:
        return
    context = experiment.parallel.context_parallel_size > 1
    worlds = around((world_size // size * size, (world_size // size + 1) * size), world_size)
    layouts = nearest_layouts(experiment, world_size)
    slots = f"{either(number for number in worlds if number)} slots"
    yield Problem(
        "parallel",
        f"tensor x pipeline{' x context' if context else ''} size {size} must divide the {world_size} slots"
        " of the hostfile",
        f"{world_size} slots",
        f"use {either(layouts)}, or {slots}" if layouts else f"use {slots}",
        layouts,
    )


def nearest_layouts(experiment: Experiment, world_size: int) -> tuple[str, ...]:
    """Up to two layouts of the model, as ``TP4 PP8``, that fill the slots, the most alike first."""
    parallel = experiment.parallel
    wanted = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    sizes = divisors(world_size)
    contexts = divisors(wanted[2]) if experiment.engine == "megatron-core" else [1]
    fitting = [
        layout
        for layout in product(sizes, sizes, contexts)
        if world_size % math.prod(layout) == 0 and _can_be(experiment, *layout)
    ]
    fitting.sort(key=lambda layout: (_distance(layout, wanted), layout))
    return tuple(_words(*layout) for layout in fitting[:2])


def _can_be(experiment: Experiment, tensor: int, stages: int, context: int) -> bool:
    """Whether an engine takes these sizes, whatever stands against the rest of the experiment."""
    parallel = experiment.parallel
    update = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": context,
    }
    virtual = parallel.virtual_pipeline_model_parallel_size
    changed = experiment.model_copy(update={"parallel": parallel.model_copy(update=update)})
    if any(split_problems(changed)):
        return False
    if experiment.engine == "megatron-core":
        interleaved = virtual == 1 or (stages > 1 and experiment.model.num_layers % (stages * virtual) == 0)
        return interleaved and not (parallel.sequence_parallel and tensor == 1)
    if experiment.engine == "megatron-deepspeed":
        return stages == 1 or (parallel.strategy == "zero" and parallel.zero_stage < 2)
    return tensor == stages == 1 or parallel.strategy != "zero"


def _distance(layout: tuple[int, ...], wanted: tuple[int, ...]) -> float:
    """Doublings and halvings from one layout to another."""
    return sum(abs(math.log2(size / other)) for size, other in zip(layout, wanted, strict=True))


def _words(tensor: int, stages: int, context: int) -> str:
    return f"TP{tensor} PP{stages}" + (f" CP{context}" if context > 1 else "")


def size_of_replica(experiment: Experiment) -> int:
    """Ranks that work on the same samples."""
    parallel = experiment.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
