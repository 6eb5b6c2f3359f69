"""Reasons why megatron-core cannot run an experiment, and why the other engines cannot do what only it can."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from tridock.engines.megatron_lm.legality import CHECKPOINT_OPTIONS
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.schema import Model, Parallel
from tridock.layout.nearest import either, nearest_divisors, nearest_multiples
from tridock.layout.split import split_problems

_PARALLEL: Final = (
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)
_RECOMPUTE: Final = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def megatron_core_problems(experiment: Experiment) -> Iterator[Problem]:
    """What stands against the engine, whatever the number of ranks."""
    yield from _strangers(experiment)
    yield from split_problems(experiment)
    yield from _virtual_problems(experiment)
    yield from _sequence_problems(experiment)
    yield from _recompute_problems(experiment)


def only_megatron_core(experiment: Experiment) -> Iterator[Problem]:
    """Fields that the other engines do not have; engine torch interleaves pipelines too."""
    parallel, model = experiment.parallel, experiment.model
    names = _PARALLEL if experiment.engine != "torch" or parallel.strategy == "zero" else _PARALLEL[1:]
    given = [(f"parallel.{name}", getattr(parallel, name)) for name in names]
    given += [(f"model.{name}", getattr(model, name)) for name in _RECOMPUTE]
    plain = {**Parallel.model_fields, **Model.model_fields}
    for where, value in given:
        if value != (default := plain[where.partition(".")[2]].default):
            todo, what = "leave it out, or use engine megatron-core", f"engine {experiment.engine} has no such option"
            yield Problem(where, what, _shown(value), todo, (_shown(default),))


def _shown(value: object) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _strangers(experiment: Experiment) -> Iterator[Problem]:
    """Fields of the other engines."""
    model, parallel = experiment.model, experiment.parallel
    what, share = (
        "megatron-core runs without DeepSpeed",
        "parallel.use_distributed_optimizer shares out the optimizer's state",
    )
    if parallel.strategy != "ddp":
        yield Problem("parallel.strategy", what, parallel.strategy, f"leave it out; {share}", ("ddp",))
    if parallel.zero_stage:
        yield Problem("parallel.zero_stage", what, str(parallel.zero_stage), f"leave it out; {share}", (0,))
    what = "has another name in megatron-core"
    if model.checkpoint_activations:
        todo = "set model.recompute_granularity to full, recompute_method to uniform and recompute_num_layers to 1"
        yield Problem("model.checkpoint_activations", what, "true", todo, ("false",))
    if model.checkpoint_num_layers != 1:
        todo = "set model.recompute_num_layers instead"
        yield Problem("model.checkpoint_num_layers", what, str(model.checkpoint_num_layers), todo, (1,))
    todo = "leave it out, or use engine megatron-deepspeed"
    for field in CHECKPOINT_OPTIONS:
        if getattr(model, field):
            yield Problem(f"model.{field}", "engine megatron-core has no such option", "true", todo, ("false",))
    if (folder := experiment.train.checkpoint_folder) is not None:
        what = "engine megatron-core saves in the run's folder"
        yield Problem("train.checkpoint_folder", what, folder, todo, ("null",))
    if experiment.megatron_args:
        got = " ".join(experiment.megatron_args)
        yield Problem("megatron_args", "engine megatron-core has no such arguments", got, todo, ("[]",))


def _virtual_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    where = "parallel.virtual_pipeline_model_parallel_size"
    if virtual == 1:
        return
    if stages == 1:
        todo = "leave it out, or set pipeline_model_parallel_size to 2 or more"
        yield Problem(where, "there is no pipeline to interleave", str(virtual), todo, (1,))
        return
    layers, rest = divmod(experiment.model.num_layers, stages)
    if rest == 0 and layers % virtual:
        near = nearest_divisors(layers, virtual)
        yield Problem(where, f"must divide the {layers} layers of a stage", str(virtual), f"use {either(near)}", near)


def _sequence_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel, length = experiment.parallel, experiment.model.seq_length
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pieces = 2 * context if context > 1 else 1
    parts = tensor * context if parallel.sequence_parallel else 1
    near = nearest_multiples(math.lcm(pieces, parts), length)
    if length % pieces:
        what = f"must be a multiple of 2 x context_parallel_size {context}"
        yield Problem("model.seq_length", what, str(length), f"use {either(near)}", near)
    elif length % parts:
        also = f" x context_parallel_size {context}" if context > 1 else ""
        what = f"sequence_parallel wants a multiple of tensor_model_parallel_size {tensor}{also}"
        yield Problem("model.seq_length", what, str(length), f"use {either(near)}", near)
    if parallel.sequence_parallel and tensor == 1:
        what, todo = "there are no tensor parallel ranks to share tokens", "set tensor_model_parallel_size to 2 or more"
        yield Problem("parallel.sequence_parallel", what, "true", f"leave it out, or {todo}", ("false",))


def _recompute_problems(experiment: Experiment) -> Iterator[Problem]:
    model, number = experiment.model, experiment.model.recompute_num_layers
    details: dict[str, tuple[int | str, ...]] = {
        "recompute_method": ("uniform", "block"),
        "recompute_num_layers": (1,),
    }
    if model.recompute_granularity != "full":
        for field in details:
            if (value := getattr(model, field)) is not None:
                todo = "set model.recompute_granularity to full, or leave it out"
                what = "is about recompute_granularity full"
                yield Problem(f"model.{field}", what, str(value), todo, ("null",))
        return
    for field, choices in details.items():
        if getattr(model, field) is None:
            todo = f"use {either(choices)}{' or more' if choices == (1,) else ''}"
            yield Problem(f"model.{field}", "recompute_granularity full needs it", "nothing", todo, choices)
    layers, rest = divmod(model.num_layers, _runs_of_layers(experiment))
    if model.recompute_method == "uniform" and number is not None and not rest and layers % number:
        near = nearest_divisors(layers, number)
        what = f"recompute_method uniform wants groups that divide the {layers} layers of a stage"
        yield Problem("model.recompute_num_layers", what, str(number), f"use {either(near)}", near)


def _runs_of_layers(experiment: Experiment) -> int:
    parallel = experiment.parallel
    return parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
