"""Reasons why megatron-core cannot run an experiment, and why the other engines cannot do what only it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.schema import Model, Parallel
from tridock.plan.megatron import CHECKPOINT_OPTIONS
from tridock.plan.model_parallel import size_of_replica, split_problems
from tridock.plan.nearest import either, nearest_divisors, nearest_multiples

_PARALLEL: Final = (
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)
_RECOMPUTE: Final = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def megatron_core_problems(experiment: Experiment, world_size: int) -> Iterator[Problem]:
    """What stands against the engine on ``world_size`` ranks."""
    yield from _strangers(experiment)
    yield from split_problems(experiment)
    yield from _virtual_problems(experiment, world_size)
    yield from _sequence_problems(experiment)
    yield from _recompute_problems(experiment)


def only_megatron_core(experiment: Experiment) -> Iterator[Problem]:
    """Fields that the other engines do not have."""
    parallel, model = experiment.parallel, experiment.model
    given = [(f"parallel.{name}", getattr(parallel, name)) for name in _PARALLEL]
    given += [(f"model.{name}", getattr(model, name)) for name in _RECOMPUTE]
    plain = {**Parallel.model_fields, **Model.model_fields}
    for where, value in given:
        if value != plain[where.partition(".")[2]].default:
            todo = "leave it out, or use engine megatron-core"
            yield Problem(where, f"engine {experiment.engine} has no such option", _shown(value), todo)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _strangers(experiment: Experiment) -> Iterator[Problem]:
    """Fields of the other engines."""
    model, parallel = experiment.model, experiment.parallel
    share = "parallel.use_distributed_optimizer shares out the optimizer's state"
    if parallel.strategy != "ddp":
        what = "megatron-core runs without DeepSpeed"
        yield Problem("parallel.strategy", what, parallel.strategy, f"leave it out; {share}")
    if parallel.zero_stage:
        what = "megatron-core runs without DeepSpeed"
        yield Problem("parallel.zero_stage", what, str(parallel.zero_stage), f"leave it out; {share}")
    if model.checkpoint_activations:
        todo = "set model.recompute_granularity to full, recompute_method to uniform and recompute_num_layers to 1"
        yield Problem("model.checkpoint_activations", "has another name in megatron-core", "true", todo)
    if model.checkpoint_num_layers != 1:
        todo = "set model.recompute_num_layers instead"
        got = str(model.checkpoint_num_layers)
        yield Problem("model.checkpoint_num_layers", "has another name in megatron-core", got, todo)
    todo = "leave it out, or use engine megatron-deepspeed"
    for field in CHECKPOINT_OPTIONS:
        if getattr(model, field):
            yield Problem(f"model.{field}", "engine megatron-core has no such option", "true", todo)
    if (folder := experiment.train.checkpoint_folder) is not None:
        yield Problem("train.checkpoint_folder", "engine megatron-core saves in the run's folder", folder, todo)
    if experiment.megatron_args:
        got = " ".join(experiment.megatron_args)
        yield Problem("megatron_args", "engine megatron-core has no such arguments", got, todo)


def _virtual_problems(experiment: Experiment, world_size: int) -> Iterator[Problem]:
    parallel, batch = experiment.parallel, experiment.batch
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    where = "parallel.virtual_pipeline_model_parallel_size"
    if virtual == 1:
        return
    if stages == 1:
        todo = "leave it out, or set pipeline_model_parallel_size to 2 or more"
        yield Problem(where, "there is no pipeline to interleave", str(virtual), todo)
        return
    layers, rest = divmod(experiment.model.num_layers, stages)
    if rest == 0 and layers % virtual:
        near = either(nearest_divisors(layers, virtual))
        yield Problem(where, f"must divide the {layers} layers of a stage", str(virtual), f"use {near}")
    replicas = world_size // size_of_replica(experiment)
    if replicas and batch.samples_per_step(replicas) % (batch.micro_batch_size * replicas * stages):
        samples, round_of_stages = batch.samples_per_step(replicas), batch.micro_batch_size * replicas * stages
        yield Problem(
            "batch.global_batch_size",
            f"an interleaved pipeline wants a multiple of micro_batch_size {batch.micro_batch_size} x"
            f" data parallel size {replicas} x pipeline_model_parallel_size {stages}",
            str(samples),
            f"use {either(nearest_multiples(round_of_stages, samples))}",
        )


def _sequence_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel, length = experiment.parallel, experiment.model.seq_length
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if context > 1 and length % (2 * context):
        near = either(nearest_multiples(2 * context, length))
        what = f"must be a multiple of 2 x context_parallel_size {context}"
        yield Problem("model.seq_length", what, str(length), f"use {near}")
    elif parallel.sequence_parallel and tensor > 1 and length % (tensor * context):
        near = either(nearest_multiples(tensor * context, length))
        also = f" x context_parallel_size {context}" if context > 1 else ""
        what = f"sequence_parallel wants a multiple of tensor_model_parallel_size {tensor}{also}"
        yield Problem("model.seq_length", what, str(length), f"use {near}")
    if parallel.sequence_parallel and tensor == 1:
        todo = "leave it out, or set tensor_model_parallel_size to 2 or more"
        yield Problem("parallel.sequence_parallel", "there are no tensor parallel ranks to share tokens", "true", todo)


def _recompute_problems(experiment: Experiment) -> Iterator[Problem]:
    model, parallel = experiment.model, experiment.parallel
    details = ("recompute_method", "recompute_num_layers")
    if model.recompute_granularity != "full":
        for field in details:
            if (value := getattr(model, field)) is not None:
                todo = "set model.recompute_granularity to full, or leave it out"
                yield Problem(f"model.{field}", "is about recompute_granularity full", str(value), todo)
        return
    for field, choices in zip(details, ("uniform or block", "1 or more"), strict=True):
        if getattr(model, field) is None:
            yield Problem(f"model.{field}", "recompute_granularity full needs it", "nothing", f"use {choices}")
    stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    layers = max(1, model.num_layers // stages)
    if model.recompute_num_layers is not None and model.recompute_num_layers > layers:
        what = f"must be at most the {layers} layers of a stage"
        yield Problem("model.recompute_num_layers", what, str(model.recompute_num_layers), f"use {layers}")
