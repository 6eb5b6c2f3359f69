"""How megatron-core treats each field of an experiment, what it cannot run, and the layouts to search."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

from tridock.engines.fields import CHECKPOINT_OPTIONS, COMMON, NO_TOKENIZER, Fields, Refused
from tridock.engines.megatron_core import experts, overlap, stages, transformer_engine
from tridock.engines.rules import Choice, Rules
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.split import divisors, either, head_problems, nearest_divisors, nearest_multiples

_NO_DEEPSPEED: Final = "megatron-core runs without DeepSpeed"
_DISTRIBUTED: Final = "leave it out; parallel.use_distributed_optimizer shares out the optimizer's state"
_OTHER_NAME: Final = "has another name in megatron-core"
_CONTEXT_TOKENS: Final = 2048
"""Least tokens of a sample for a context parallel rank; Megatron Bridge's recipes for Llama 3 leave 4,096."""

FIELDS: Final[Fields] = {
    **COMMON,
    "parallel.strategy": Refused(_NO_DEEPSPEED, _DISTRIBUTED, default="ddp"),
    "deepspeed": Refused(_NO_DEEPSPEED, "leave it out"),
    "parallel.zero_stage": Refused(_NO_DEEPSPEED, _DISTRIBUTED),
    "parallel.data_parallel_shard_size": Refused(),
    "parallel.reduce_gradients_once": Refused(),
    "parallel.pipeline_schedule": Refused(),
    "model.checkpoint_activations": Refused(
        _OTHER_NAME,
        "set model.recompute_granularity to full, recompute_method to uniform and recompute_num_layers to 1",
    ),
    "model.checkpoint_num_layers": Refused(_OTHER_NAME, "set model.recompute_num_layers instead"),
    **dict.fromkeys((f"model.{name}" for name in CHECKPOINT_OPTIONS), Refused()),
    "train.compile": Refused(),
    "model.add_attention_bias": Refused(
        "megatron-core has biases of all linear layers (add_bias_linear), or of queries, keys and values (add_qkv_bias)"
    ),
    "model.qk_layernorm_all_heads": Refused("megatron-core normalizes the queries and keys of each head"),
    "model.use_post_norm": Refused("megatron-core normalizes the inputs of attention and MLP"),
    **dict.fromkeys(
        ("model.embedding_multiplier", "model.residual_multiplier", "model.logits_scaling"),
        Refused("megatron-core has no such multiplier"),
    ),
    "megatron_args": Refused("engine megatron-core has no such arguments"),
    **NO_TOKENIZER,
}


class MegatronCoreRules(Rules):
    """The rules of NVIDIA's package: tensor, pipeline, context, expert and data parallelism."""

    fields = FIELDS

    def problems(self, experiment: Experiment) -> Iterator[Problem]:
        yield from split_problems(experiment)
        yield from stages.virtual_problems(experiment)
        yield from _sequence_problems(experiment)
        yield from experts.problems(experiment)
        yield from _mapping_problems(experiment)
        yield from _recompute_problems(experiment)
        yield from transformer_engine.problems(experiment)
        yield from overlap.problems(experiment)

    def takes_sizes(self, experiment: Experiment) -> bool:
        parallel = experiment.parallel
        if any(split_problems(experiment)) or any(stages.virtual_problems(experiment)):
            return False
        return not (parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1)

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        if experiment.parallel.virtual_pipeline_model_parallel_size > 1:
            yield from interleaved_batch_problems(experiment, replicas)
        else:
            yield from super().batch_problems(experiment, replicas)
        yield from experts.rank_problems(experiment, replicas)

    node_problems = staticmethod(overlap.node_problems)

    def gpu_problems(self, experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:
        yield from transformer_engine.gpu_problems(experiment, gpu)
        yield from overlap.gpu_problems(experiment, gpu)

    def context_sizes(self, experiment: Experiment) -> tuple[int, ...]:
        """Returns the sizes that leave a rank enough tokens to compute while it exchanges keys and values."""
        tokens, own = experiment.model.seq_length, experiment.parallel.context_parallel_size
        worth = {size for size in divisors(max(1, tokens // 2)) if tokens // size >= _CONTEXT_TOKENS}
        return tuple(sorted(worth | {1, own}))

    def layout_choices(self, experiment: Experiment, tensor: int, size: int) -> Iterator[Choice]:
        mixture = experiment.model.num_moe_experts is not None
        sequences = (mixture,) if tensor > 1 and mixture else (False, True) if tensor > 1 else (False,)
        splits = stages.stage_choices(experiment, size)
        for split, sequence, mixed in product(splits, sequences, experts.expert_choices(experiment, tensor)):
            yield {**split, "parallel.sequence_parallel": sequence, **mixed}

    def state_choices(self, experiment: Experiment, stages: int) -> Iterator[Choice]:
        yield from ({"parallel.use_distributed_optimizer": value} for value in (False, True))

    def recompute_choices(self) -> tuple[Choice, ...]:
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        values = ((None, None, None), ("selective", None, None), ("full", "uniform", 1))
        return tuple({f"model.{name}": value for name, value in zip(names, given, strict=True)} for given in values)

    def partial_recompute_choices(self, experiment: Experiment) -> tuple[Choice, ...]:
        if experiment.model.recompute_granularity != "full":
            return ()
        longest = max(stages.layers_of_stages(experiment)) // experiment.parallel.virtual_pipeline_model_parallel_size
        return tuple(
            {"model.recompute_method": "block", "model.recompute_num_layers": count} for count in range(1, longest)
        )


def split_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields heads that the ranks cannot split, and layers that the stages cannot have."""
    yield from head_problems(experiment, repeats_groups=True)
    yield from stages.problems(experiment)


def interleaved_batch_problems(experiment: Experiment, replicas: int) -> Iterator[Problem]:
    """Yields a number of micro batches that does not fill an interleaved pipeline."""
    micro, size = experiment.batch.micro_batch_size, experiment.parallel.pipeline_model_parallel_size
    samples = experiment.batch.samples_per_step(replicas)
    if samples % (micro * replicas * size):
        near = nearest_multiples(micro * replicas * size, samples)
        sizes = f"micro_batch_size {micro} x data parallel size {replicas} x pipeline_model_parallel_size {size}"
        what = f"an interleaved pipeline needs a multiple of {sizes}"
        yield Problem("batch.global_batch_size", what, str(samples), f"use {either(near)}", near)


def _mapping_problems(experiment: Experiment) -> Iterator[Problem]:
    """Its expert groups are uneven, even for a model without experts (0.16.1)."""
    parallel = experiment.parallel
    context = parallel.context_parallel_size
    if (
        experiment.model.num_moe_experts is None
        and parallel.use_tp_pp_dp_mapping
        and context > 1
        and parallel.pipeline_model_parallel_size > 1
    ):
        todo = "leave it out, or set context_parallel_size to 1"
        what = "megatron-core does not number the ranks so with context parallelism"
        yield Problem("parallel.use_tp_pp_dp_mapping", what, "true", todo, ("false",))


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
        what = f"sequence_parallel needs a multiple of tensor_model_parallel_size {tensor}{also}"
        yield Problem("model.seq_length", what, str(length), f"use {either(near)}", near)
    if parallel.sequence_parallel and tensor == 1:
        what, todo = "there are no tensor parallel ranks to split tokens", "set tensor_model_parallel_size to 2 or more"
        yield Problem("parallel.sequence_parallel", what, "true", f"leave it out, or {todo}", ("false",))


def _recompute_problems(experiment: Experiment) -> Iterator[Problem]:
    model, parallel, number = experiment.model, experiment.parallel, experiment.model.recompute_num_layers
    details: dict[str, tuple[int | str, ...]] = {"recompute_method": ("uniform", "block"), "recompute_num_layers": (1,)}
    if model.recompute_granularity != "full":
        for field in details:
            if (value := getattr(model, field)) is not None:
                todo = "set model.recompute_granularity to full, or leave it out"
                what = "applies only to recompute_granularity full"
                yield Problem(f"model.{field}", what, str(value), todo, ("null",))
        return
    for field, choices in details.items():
        if getattr(model, field) is None:
            todo = f"use {either(choices)}{' or more' if choices == (1,) else ''}"
            yield Problem(f"model.{field}", "recompute_granularity full needs it", "nothing", todo, choices)
    if model.recompute_method != "uniform" or number is None:
        return
    if any(stages.problems(experiment)) or any(stages.virtual_problems(experiment)):
        return
    chunks = tuple(
        layers // parallel.virtual_pipeline_model_parallel_size for layers in stages.layers_of_stages(experiment)
    )
    if (common := math.gcd(*chunks)) % number:
        near = nearest_divisors(common, number)
        what = f"recompute_method uniform needs groups that divide {stages.of_a_stage(chunks)}"
        yield Problem("model.recompute_num_layers", what, str(number), f"use {either(near)}", near)
