"""The values that a problem names beside the message: each of them does away with it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tridock.engines.fields import CHECKPOINT_OPTIONS
from tridock.errors import Problem
from tridock.experiment import Experiment, parse_experiment
from tridock.plan.legality import layout_problems

BASE = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16}
batch: {micro_batch_size: 1}
data: {data_path: data/x, vocab_file: v, merge_file: m}
train: {train_iters: 30}
"""
SIZES = st.sampled_from([1, 1, 2, 3, 4, 5, 8])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    "model.num_layers": st.integers(1, 24),
    "model.hidden_size": st.sampled_from([12, 24, 60, 64]),
    "model.num_attention_heads": SIZES,
    "model.seq_length": st.integers(1, 40),
    "model.max_position_embeddings": st.sampled_from(["null", 12, 40]),
    "model.checkpoint_activations": st.sampled_from(["false", "true"]),
    "model.checkpoint_num_layers": SIZES,
    **{f"model.{field}": st.sampled_from(["false", "true"]) for field in CHECKPOINT_OPTIONS},
    "model.recompute_granularity": st.sampled_from(["null", "full", "selective"]),
    "model.recompute_method": st.sampled_from(["null", "uniform", "block"]),
    "model.recompute_num_layers": st.sampled_from(["null", 1, 2, 5]),
    "parallel.strategy": st.sampled_from(["ddp", "zero"]),
    "parallel.zero_stage": st.integers(0, 3),
    "parallel.tensor_model_parallel_size": SIZES,
    "parallel.pipeline_model_parallel_size": SIZES,
    "parallel.virtual_pipeline_model_parallel_size": SIZES,
    "parallel.context_parallel_size": SIZES,
    "parallel.sequence_parallel": st.sampled_from(["false", "true"]),
    "parallel.use_distributed_optimizer": st.sampled_from(["false", "true"]),
    "batch.micro_batch_size": SIZES,
    "batch.global_batch_size": st.sampled_from(["null", 1, 7, 12, 64]),
    "optimizer.lr": st.sampled_from([1.5e-4, 1.23456789e-7]),
    "optimizer.min_lr": st.sampled_from([0.0, 1.0e-5, 1.0]),
    "optimizer.lr_warmup_iters": st.sampled_from([0, 5, 30]),
    "optimizer.lr_decay_iters": st.sampled_from(["null", 1, 5]),
    "train.seed": st.integers(0, 1),
    "train.save": st.sampled_from(["false", "true"]),
    "train.checkpoint_folder": st.sampled_from(["null", "elsewhere"]),
    "megatron_args": st.sampled_from(["[]", "[--x]", "[--fp16]"]),
}
WITHOUT = ("data.vocab_file", "data.merge_file", "megatron_args", "parallel")
"""What need not have a nearest value: a file's name, other arguments of Megatron, slots that fit no layout."""
PLACES = {
    "TP": "parallel.tensor_model_parallel_size",
    "PP": "parallel.pipeline_model_parallel_size",
    "CP": "parallel.context_parallel_size",
}


def replaced(problem: Problem, value: int | str) -> list[str]:
    """The overrides that put the value where the problem is; a layout is several."""
    if problem.where != "parallel":
        return [f"{problem.where}={value}"]
    sizes = {"CP": "1", **{word[:2]: word[2:] for word in str(value).split()}}
    return [f"{PLACES[name]}={size}" for name, size in sizes.items()]


def build(overrides: list[str]) -> Experiment:
    return parse_experiment(BASE, "e.yaml", overrides)


@pytest.mark.parametrize("engine", ["torch", "megatron-deepspeed", "megatron-core"])
def test_the_nearest_values_do_away_with_the_problem(engine: str) -> None:
    # A few fields at a time, or every experiment would have all problems there are.
    some = st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=8)

    @settings(max_examples=150)
    @given(
        some.flatmap(lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})), st.integers(1, 24)
    )
    def check(fields: dict[str, Any], world_size: int) -> None:
        overrides = [f"engine={engine}", *(f"{name}={value}" for name, value in fields.items())]
        for problem in layout_problems(build(overrides), world_size):
            assert problem.nearest or problem.where in WITHOUT, str(problem)
            for value in problem.nearest:
                corrected = build([*overrides, *replaced(problem, value)])
                left = [str(other) for other in layout_problems(corrected, world_size) if other.where == problem.where]
                assert not left, f"{value} for {problem}: {left}"

    check()


@pytest.mark.parametrize(
    ("world_size", "override", "nearest"),
    [
        (48, "train.seed=1", ("TP4 PP6", "TP4 PP12")),
        (72, "parallel.virtual_pipeline_model_parallel_size=3", ("TP1 PP8", "TP2 PP4")),
        (40, "parallel.sequence_parallel=true", ("TP2 PP4", "TP4 PP2")),
        (7, "parallel.sequence_parallel=true", ()),
        (7, "train.seed=1", ("TP1 PP1",)),
    ],
)
def test_a_layout_is_one_that_the_engine_takes(world_size: int, override: str, nearest: tuple[str, ...]) -> None:
    overrides = ["engine=megatron-core", "model.num_layers=24", "model.hidden_size=64", "model.num_attention_heads=16"]
    overrides += ["parallel.tensor_model_parallel_size=4", "parallel.pipeline_model_parallel_size=8"]
    (problem,) = layout_problems(build([*overrides, override]), world_size)
    assert problem.nearest == nearest
