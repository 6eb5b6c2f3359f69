"""How engine ``torch`` treats each field of an experiment, and reasons why it cannot run an experiment."""

from collections.abc import Iterator
from typing import Final

from tridock.engines.deepspeed import zero_stage_problems
from tridock.engines.engine import uneven_batch
from tridock.engines.fields import COMMON, HONOURED, MIXTURE, NO_TOKENIZER, Fields, Refused
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout.split import either, empty_stage_problems, head_problems, nearest_divisors, nearest_multiples

FIELDS: Final[Fields] = {
    **COMMON,
    "deepspeed": HONOURED,
    **dict.fromkeys(MIXTURE, Refused("engine torch has no mixture of experts")),
    "model.checkpoint_num_layers": Refused("engine torch stores every layer's"),
    "model.partition_activations": Refused(),
    "model.checkpoint_in_cpu": Refused(),
    "model.contiguous_checkpointing": Refused(),
    "model.synchronize_each_layer": Refused(),
    "model.recompute_granularity": Refused(),
    "model.recompute_method": Refused(),
    "model.recompute_num_layers": Refused(),
    "model.transformer_impl": Refused(),
    "model.fp8": Refused(),
    "parallel.decoder_first_pipeline_num_layers": Refused(),
    "parallel.decoder_last_pipeline_num_layers": Refused(),
    "parallel.context_parallel_size": Refused(),
    "parallel.sequence_parallel": Refused(),
    "parallel.tp_comm_overlap": Refused(),
    "parallel.use_distributed_optimizer": Refused(),
    "megatron_args": Refused("engine torch has no such arguments"),
    "data.vocab_file": NO_TOKENIZER,
    "data.merge_file": NO_TOKENIZER,
}


def problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields the engine's problems that do not depend on the number of ranks, except refused fields."""
    yield from _strategy_problems(experiment)
    if experiment.parallel.strategy != "zero":
        yield from split_problems(experiment)
        yield from _schedule_problems(experiment)
    yield from zero_stage_problems(experiment)


def split_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields heads and layers that the ranks cannot split."""
    yield from head_problems(experiment)
    yield from empty_stage_problems(experiment)


def batch_problems(experiment: Experiment, replicas: int) -> Iterator[Problem]:
    """Yields global batches that the replicas, the schedule or the shards cannot process."""
    parallel = experiment.parallel
    samples, per_pass = experiment.batch.samples_per_step(replicas), experiment.batch.micro_batch_size * replicas
    stages = parallel.pipeline_model_parallel_size
    if samples % per_pass == 0:
        yield from _even_batch_problems(experiment, replicas)
        return
    if stages == 1 or parallel.pipeline_schedule == "gpipe":
        near = nearest_multiples(per_pass, samples)
    elif parallel.pipeline_schedule == "interleaved":
        near = nearest_multiples(stages * per_pass, samples)
    else:
        near = (stages * per_pass,) if samples < stages * per_pass else nearest_multiples(per_pass, samples)
    yield uneven_batch(experiment, replicas, f"use {either(near)}" + (", or leave it out" if stages == 1 else ""), near)


def _even_batch_problems(experiment: Experiment, replicas: int) -> Iterator[Problem]:
    """Yields what the schedule requires of micro-batches, and shards of replicas. The batch divides evenly."""
    parallel, micro = experiment.parallel, experiment.batch.micro_batch_size
    shards = parallel.data_parallel_shard_size
    if shards is not None and replicas % shards:
        near = nearest_divisors(replicas, shards)
        what, todo = f"must divide the data parallel size {replicas}", f"use {either(near)}, or leave it out"
        yield Problem("parallel.data_parallel_shard_size", what, str(shards), todo, near)
    stages = parallel.pipeline_model_parallel_size
    if stages == 1:
        return
    where, samples, per_pass = "batch.global_batch_size", experiment.batch.samples_per_step(replicas), micro * replicas
    steps = samples // per_pass
    sizes = f"micro_batch_size {micro} x data parallel size {replicas} x pipeline_model_parallel_size {stages}"
    if parallel.pipeline_schedule == "1f1b" and steps < stages:
        near = (stages * per_pass,)
        todo = f"use {near[0]} or more, or parallel.pipeline_schedule gpipe"
        yield Problem(where, f"schedule 1f1b needs at least {sizes}", str(samples), todo, near)
    if parallel.pipeline_schedule == "interleaved" and steps % max(1, steps // stages):
        multiples = nearest_multiples(stages * per_pass, samples)
        what = f"schedule interleaved wants a multiple of {sizes}"
        yield Problem(where, what, str(samples), f"use {either(multiples)}", multiples)


def _strategy_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    if parallel.strategy == "zero":
        for field in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
        ):
            if (size := getattr(parallel, field)) != 1:
                what = "DeepSpeed's ZeRO does not split the torch engine's model"
                yield Problem(f"parallel.{field}", what, str(size), "set it to 1, or strategy to fsdp or ddp", (1,))
    if parallel.strategy == "fsdp" and parallel.zero_stage != 0:
        what, todo = "strategy fsdp shares everything out, as ZeRO 3 does", "set it to 0, or strategy to zero"
        yield Problem("parallel.zero_stage", what, str(parallel.zero_stage), todo, (0,))
    if parallel.strategy != "fsdp" and (size := parallel.data_parallel_shard_size) is not None:
        what, todo = f"strategy {parallel.strategy} has no shards", "leave it out, or set strategy to fsdp"
        yield Problem("parallel.data_parallel_shard_size", what, str(size), todo, ("null",))
    if parallel.reduce_gradients_once and (parallel.strategy != "fsdp" or parallel.pipeline_model_parallel_size > 1):
        what = "the choice is that of strategy fsdp without a pipeline"
        stages = parallel.pipeline_model_parallel_size
        got = f"true with strategy {parallel.strategy}" + (f" and {stages} stages" if stages > 1 else "")
        yield Problem("parallel.reduce_gradients_once", what, got, "leave it out", ("false",))


def _schedule_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel, model = experiment.parallel, experiment.model
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    where = "parallel.virtual_pipeline_model_parallel_size"
    if stages == 1:
        if virtual > 1:
            todo = "leave it out, or set pipeline_model_parallel_size to 2 or more"
            yield Problem(where, "there is no pipeline to interleave", str(virtual), todo, (1,))
        return
    if (virtual > 1) != (parallel.pipeline_schedule == "interleaved"):
        what = "above 1 goes with pipeline_schedule interleaved, and 1 with the others"
        other = "1f1b" if virtual > 1 else "interleaved"
        todo = f"set it to {1 if virtual > 1 else 2}" if other == "1f1b" else "set it to 2 or more"
        got = f"{virtual} with {parallel.pipeline_schedule}"
        schedule = "interleaved" if virtual > 1 else "1f1b"
        yield Problem(where, what, got, f"{todo}, or pipeline_schedule to {schedule}", (1 if virtual > 1 else 2,))
    elif virtual > 1 and model.num_layers % (stages * virtual):
        near = nearest_divisors(model.num_layers, stages * virtual)
        what = f"an interleaved pipeline wants pipeline x virtual size to divide num_layers {model.num_layers}"
        yield Problem(where, what, f"{stages} x {virtual}", f"use sizes whose product is {either(near)}", ())
