"""Reasons why an experiment cannot run on a number of ranks: all of them, each with the nearest choice that can."""

from __future__ import annotations

from collections.abc import Iterator

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.plan.megatron import CHECKPOINT_OPTIONS, megatron_problems
from tridock.plan.megatron_core import megatron_core_problems, only_megatron_core
from tridock.plan.model_parallel import size_of_replica
from tridock.plan.nearest import either, nearest_divisors, nearest_multiples


def layout_problems(experiment: Experiment, world_size: int) -> list[Problem]:
    """Every problem of the experiment on ``world_size`` ranks; ``where`` is the field's path."""
    return [
        *_engine_problems(experiment, world_size),
        *_model_problems(experiment),
        *_batch_problems(experiment, world_size),
        *_schedule_problems(experiment),
    ]


def _engine_problems(experiment: Experiment, world_size: int) -> Iterator[Problem]:
    parallel = experiment.parallel
    if experiment.engine == "megatron-core":
        yield from megatron_core_problems(experiment, world_size)
        return
    if experiment.engine == "megatron-deepspeed":
        yield from megatron_problems(experiment)
    else:
        yield from _torch_problems(experiment)
    yield from only_megatron_core(experiment)
    if parallel.strategy == "ddp" and parallel.zero_stage != 0:
        yield Problem(
            "parallel.zero_stage",
            "strategy ddp keeps everything on every rank",
            str(parallel.zero_stage),
            "set it to 0, or strategy to zero",
        )


def _torch_problems(experiment: Experiment) -> Iterator[Problem]:
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = getattr(experiment.parallel, field)
        if size != 1:
            yield Problem(f"parallel.{field}", "the torch engine does not split the model", str(size), "set it to 1")
    if experiment.model.checkpoint_num_layers != 1:
        yield Problem(
            "model.checkpoint_num_layers",
            "the torch engine stores every layer's",
            str(experiment.model.checkpoint_num_layers),
            "leave it out, or use engine megatron-deepspeed",
        )
    for field in CHECKPOINT_OPTIONS:
        if getattr(experiment.model, field):
            yield Problem(
                f"model.{field}",
                "the torch engine has no such option",
                "true",
                "leave it out, or use engine megatron-deepspeed",
            )
    if (folder := experiment.train.checkpoint_folder) is not None:
        what, todo = "the torch engine saves in the run's folder", "leave it out, or use engine megatron-deepspeed"
        yield Problem("train.checkpoint_folder", what, folder, todo)
    if experiment.megatron_args:
        got, todo = " ".join(experiment.megatron_args), "remove it, or use engine megatron-deepspeed"
        yield Problem("megatron_args", "the torch engine has no such arguments", got, todo)


def _model_problems(experiment: Experiment) -> Iterator[Problem]:
    model = experiment.model
    if model.hidden_size % model.num_attention_heads:
        near = nearest_divisors(model.hidden_size, model.num_attention_heads)
        yield Problem(
            "model.num_attention_heads",
            f"must divide hidden_size {model.hidden_size}",
            str(model.num_attention_heads),
            f"use {either(near)}",
        )
    positions = model.max_position_embeddings
    if positions is not None and positions < model.seq_length:
        yield Problem(
            "model.max_position_embeddings",
            f"must be at least seq_length {model.seq_length}",
            str(positions),
            f"raise it to {model.seq_length}, or leave it out",
        )


def _batch_problems(experiment: Experiment, world_size: int) -> Iterator[Problem]:
    parallel, batch = experiment.parallel, experiment.batch
    model_parallel = size_of_replica(experiment)
    if world_size % model_parallel:
        sizes = "tensor x pipeline x context" if parallel.context_parallel_size > 1 else "tensor x pipeline"
        yield Problem(
            "parallel",
            f"{sizes} size {model_parallel} must divide the {world_size} slots of the hostfile",
            f"{world_size} slots",
            "change the layout, or the hostfile's slots",
        )
        return
    per_pass = batch.micro_batch_size * (world_size // model_parallel)
    samples = batch.samples_per_step(world_size // model_parallel)
    if samples % per_pass:
        choices = nearest_multiples(per_pass, samples)
        yield Problem(
            "batch.global_batch_size",
            f"must be a multiple of micro_batch_size {batch.micro_batch_size} x"
            f" data parallel size {world_size // model_parallel}",
            str(samples),
            f"use {either(choices)}, or leave it out",
        )
    elif experiment.engine == "megatron-deepspeed" and parallel.strategy == "ddp" and samples != per_pass:
        yield Problem(
            "batch.global_batch_size",
            "Megatron v1.1.5 without DeepSpeed does not accumulate gradients",
            str(samples),
            f"use {per_pass}, or strategy zero",
        )


def _schedule_problems(experiment: Experiment) -> Iterator[Problem]:
    optimizer, iterations = experiment.optimizer, experiment.train.train_iters
    decay = optimizer.lr_decay_iters or iterations
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_iters >= decay:
        yield Problem(
            "optimizer.lr_warmup_iters",
            f"must be less than lr_decay_iters {decay}",
            str(optimizer.lr_warmup_iters),
            "lower it",
        )
    if optimizer.min_lr > optimizer.lr:
        yield Problem("optimizer.min_lr", f"must not exceed lr {optimizer.lr:g}", f"{optimizer.min_lr:g}", "lower it")
