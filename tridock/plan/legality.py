"""Reasons why an experiment cannot run on a number of ranks: all of them, each with the nearest choice that can."""

from __future__ import annotations

from collections.abc import Iterator

from tridock.engines.megatron_core.legality import megatron_core_problems, only_megatron_core
from tridock.engines.megatron_lm.legality import megatron_problems
from tridock.engines.torch.legality import nearest_batches, only_torch, torch_batch_problems, torch_problems
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout.nearest import either, nearest_divisors, nearest_multiples
from tridock.layout.split import size_of_replica, world_problems
from tridock.plan.resnet import resnet_problems


def layout_problems(experiment: Experiment, world_size: int) -> list[Problem]:
    """Every problem of the experiment on ``world_size`` ranks; ``where`` is the field's path."""
    return [
        *resnet_problems(experiment),
        *_engine_problems(experiment),
        *_model_problems(experiment),
        *_batch_problems(experiment, world_size),
        *_schedule_problems(experiment),
    ]


def _engine_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    if experiment.engine == "megatron-core":
        yield from only_torch(experiment)
        yield from megatron_core_problems(experiment)
        return
    if experiment.engine == "megatron-deepspeed":
        yield from only_torch(experiment)
        yield from megatron_problems(experiment)
    else:
        yield from torch_problems(experiment)
    yield from only_megatron_core(experiment)
    if parallel.strategy == "ddp" and parallel.zero_stage != 0:
        what, todo = "strategy ddp keeps everything on every rank", "set it to 0, or strategy to zero"
        yield Problem("parallel.zero_stage", what, str(parallel.zero_stage), todo, (0,))


def _model_problems(experiment: Experiment) -> Iterator[Problem]:
    model = experiment.model
    if model.hidden_size % model.num_attention_heads:
        tensor = experiment.parallel.tensor_model_parallel_size
        near = nearest_divisors(model.hidden_size, model.num_attention_heads, multiple_of=tensor)
        what, got = f"must divide hidden_size {model.hidden_size}", str(model.num_attention_heads)
        yield Problem("model.num_attention_heads", what, got, f"use {either(near)}", near)
    length, positions = model.seq_length, model.max_position_embeddings
    if positions is not None and positions < length:
        what, todo = f"must be at least seq_length {length}", f"raise it to {length}, or leave it out"
        yield Problem("model.max_position_embeddings", what, str(positions), todo, (length,))


def _batch_problems(experiment: Experiment, world_size: int) -> Iterator[Problem]:
    parallel, micro = experiment.parallel, experiment.batch.micro_batch_size
    yield from world_problems(experiment, world_size)
    replicas, rest = divmod(world_size, size_of_replica(experiment))
    if rest:
        return
    where, samples = "batch.global_batch_size", experiment.batch.samples_per_step(replicas)
    stages, per_pass = parallel.pipeline_model_parallel_size, micro * replicas
    sizes = f"micro_batch_size {micro} x data parallel size {replicas}"
    if parallel.virtual_pipeline_model_parallel_size > 1 and experiment.engine == "megatron-core":
        if samples % (per_pass * stages):
            near = nearest_multiples(per_pass * stages, samples)
            what = f"an interleaved pipeline wants a multiple of {sizes} x pipeline_model_parallel_size {stages}"
            yield Problem(where, what, str(samples), f"use {either(near)}", near)
    elif experiment.engine == "megatron-deepspeed" and parallel.strategy == "ddp":
        if samples != per_pass:
            what = "Megatron v1.1.5 without DeepSpeed does not accumulate gradients"
            yield Problem(where, what, str(samples), f"use {per_pass}, or strategy zero", (per_pass,))
    elif samples % per_pass:
        near = nearest_batches(experiment, per_pass, samples)
        todo = f"use {either(near)}" + (", or leave it out" if stages == 1 or experiment.engine != "torch" else "")
        yield Problem(where, f"must be a multiple of {sizes}", str(samples), todo, near)
    elif experiment.engine == "torch":
        yield from torch_batch_problems(experiment, replicas)


def _schedule_problems(experiment: Experiment) -> Iterator[Problem]:
    """What Megatron's ``OptimizerParamScheduler`` refuses; every engine's schedule is that one."""
    optimizer, iterations = experiment.optimizer, experiment.train.train_iters
    decay, warmup = optimizer.lr_decay_iters or iterations, optimizer.lr_warmup_iters
    if warmup and warmup >= decay:
        what = f"must be less than lr_decay_iters {decay}"
        yield Problem("optimizer.lr_warmup_iters", what, str(warmup), "lower it", (decay // 2,))
    if optimizer.min_lr > optimizer.lr:
        what, got = f"must not exceed lr {optimizer.lr:g}", f"{optimizer.min_lr:g}"
        yield Problem("optimizer.min_lr", what, got, "lower it", (repr(optimizer.lr),))
