"""How engine ``torch`` treats each field of an experiment, what it cannot run, and the layouts to search."""

from collections.abc import Iterator
from typing import Final

from tridock.engines.deepspeed import zero_stage_problems
from tridock.engines.fields import CHECKPOINT_OPTIONS, COMMON, CORE_ONLY, MIXTURE, NO_TOKENIZER, Fields, Refused
from tridock.engines.offload import offload_choices
from tridock.engines.rules import Choice, Rules, uneven_batch
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout import split

FIELDS: Final[Fields] = {
    **COMMON,
    **dict.fromkeys(MIXTURE, Refused("engine torch has no mixture of experts")),
    "model.checkpoint_num_layers": Refused("engine torch stores every layer's"),
    **dict.fromkeys((f"model.{name}" for name in CHECKPOINT_OPTIONS), Refused()),
    **dict.fromkeys(CORE_ONLY, Refused()),
    "megatron_args": Refused("engine torch has no such arguments"),
    **NO_TOKENIZER,
}


class TorchRules(Rules):
    """The rules of the GPT and ResNet-50 under DDP, FSDP2, tensor parallelism, pipelines, and DeepSpeed's ZeRO."""

    fields = FIELDS
    trains_images = True

    def problems(self, experiment: Experiment) -> Iterator[Problem]:
        yield from _strategy_problems(experiment)
        if experiment.parallel.strategy != "zero":
            yield from split_problems(experiment)
            yield from _schedule_problems(experiment)
        yield from zero_stage_problems(experiment)

    def takes_sizes(self, experiment: Experiment) -> bool:
        parallel = experiment.parallel
        fits = parallel.context_parallel_size == 1 and not any(split_problems(experiment))
        return fits and not (parallel.splits_model and parallel.strategy == "zero")

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        """Yields global batches that the replicas, the schedule or the shards cannot process."""
        parallel = experiment.parallel
        samples, per_pass = experiment.batch.samples_per_step(replicas), experiment.batch.micro_batch_size * replicas
        stages = parallel.pipeline_model_parallel_size
        if samples % per_pass == 0:
            yield from _even_batch_problems(experiment, replicas)
            return
        if stages == 1 or parallel.pipeline_schedule == "gpipe":
            near = split.nearest_multiples(per_pass, samples)
        elif parallel.pipeline_schedule == "interleaved":
            near = split.nearest_multiples(stages * per_pass, samples)
        else:
            near = (stages * per_pass,) if samples < stages * per_pass else split.nearest_multiples(per_pass, samples)
        todo = f"use {split.either(near)}" + (", or leave it out" if stages == 1 else "")
        yield uneven_batch(experiment, replicas, todo, near)

    def padded_vocab_size(self, tokens: int, experiment: Experiment) -> int:
        """The same on every layout, because padding rows take part in the loss."""
        multiple = experiment.model.make_vocab_size_divisible_by
        return -(-tokens // multiple) * multiple

    def splits_model(self, experiment: Experiment) -> bool:
        return experiment.parallel.strategy != "zero"

    def state_choices(self, experiment: Experiment, stages: int) -> Iterator[Choice]:
        if experiment.parallel.strategy != "fsdp":
            yield from super().state_choices(experiment, stages)
        else:
            yield from ({"parallel.reduce_gradients_once": once} for once in (False, True)[: 1 if stages > 1 else 2])

    def offload_choices(self, experiment: Experiment) -> Iterator[Choice]:
        if experiment.parallel.strategy == "zero":
            yield from offload_choices(experiment)

    def recompute_choices(self) -> tuple[Choice, ...]:
        return ({"model.checkpoint_activations": False}, {"model.checkpoint_activations": True})

    def is_repeated(self, choice: Choice, replicas: int, accumulation: int) -> bool:
        """One micro batch is reduced once either way, and one replica reduces nothing."""
        return 1 in (replicas, accumulation) and choice.get("parallel.reduce_gradients_once") is True


def split_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields heads and layers that the ranks cannot split."""
    size = experiment.parallel.tensor_model_parallel_size
    if experiment.model.qk_layernorm_all_heads and experiment.model.normalization == "LayerNorm" and size > 1:
        what = "with qk_layernorm_all_heads, needs normalization RMSNorm"
        todo = "set it to 1: fsdp and stages split the model"
        yield Problem("parallel.tensor_model_parallel_size", what, str(size), todo, (1,))
    yield from split.head_problems(experiment)
    yield from split.empty_stage_problems(experiment)


def _even_batch_problems(experiment: Experiment, replicas: int) -> Iterator[Problem]:
    """Yields what the schedule requires of micro-batches, and shards of replicas. The batch divides evenly."""
    parallel, micro = experiment.parallel, experiment.batch.micro_batch_size
    shards = parallel.data_parallel_shard_size
    if shards is not None and replicas % shards:
        where, named = "parallel.data_parallel_shard_size", f"the data parallel size {replicas}"
        yield split.must_divide(where, shards, replicas, named, ", or leave it out")
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
        multiples = split.nearest_multiples(stages * per_pass, samples)
        what = f"schedule interleaved wants a multiple of {sizes}"
        yield Problem(where, what, str(samples), f"use {split.either(multiples)}", multiples)


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
        near = split.nearest_divisors(model.num_layers, stages * virtual)
        what = f"an interleaved pipeline wants pipeline x virtual size to divide num_layers {model.num_layers}"
        yield Problem(where, what, f"{stages} x {virtual}", f"use sizes whose product is {split.either(near)}", ())
