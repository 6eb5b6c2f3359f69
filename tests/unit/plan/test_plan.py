"""Batch arithmetic, the rank map, and every reason for which a layout is refused."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experiments import make_plan
from tridock.errors import RequestError
from tridock.experiment import parse_experiment
from tridock.layout.split import nearest_divisors, nearest_multiple, nearest_multiples
from tridock.plan import Plan

BASE = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16}
batch: {micro_batch_size: 2, global_batch_size: 12}
data: {data_path: data/x}
train: {train_iters: 30}
"""


def planned(slots: Mapping[str, Sequence[int]], *overrides: str) -> Plan:
    return make_plan(parse_experiment(BASE, "e.yaml", overrides), slots, "e.yaml")


def refused(slots: Mapping[str, Sequence[int]], *overrides: str) -> list[str]:
    with pytest.raises(RequestError) as caught:
        planned(slots, *overrides)
    return str(caught.value).splitlines()


def test_ranks_go_node_by_node_and_slot_by_slot() -> None:
    plan = planned({"a": [0], "b": [4, 5]})
    assert [(r.rank, r.node, r.slot, r.local_rank) for r in plan.ranks] == [
        (0, "a", 0, 0), (1, "b", 4, 0), (2, "b", 5, 1),
    ]  # fmt: skip
    assert (plan.world_size, plan.data_parallel_size, plan.accumulation_steps) == (3, 3, 2)
    assert plan.tokens_per_step == 12 * 16
    assert plan.layout == "TP1 PP1 DP3"
    assert plan.document()["ranks"][2]["slot"] == 5


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40))
def test_the_global_batch_is_exactly_what_the_ranks_work_through(world: int, micro: int, batch: int) -> None:
    overrides = [f"batch.micro_batch_size={micro}", f"batch.global_batch_size={batch}"]
    if batch % (world * micro):
        assert len(refused({"a": range(world)}, *overrides)) == 1
    else:
        plan = planned({"a": range(world)}, *overrides)
        assert plan.micro_batch_size * plan.data_parallel_size * plan.accumulation_steps == batch


def test_every_problem_at_once() -> None:
    overrides = [
        "parallel.strategy=ddp", "parallel.zero_stage=2", "parallel.tensor_model_parallel_size=2",
        "model.num_attention_heads=3", "model.max_position_embeddings=8", "batch.global_batch_size=7",
        "optimizer.lr_warmup_iters=30", "optimizer.lr_warmup_fraction=0.1", "optimizer.min_lr=1",
        "env.CUDA_VISIBLE_DEVICES='0'", "train.eval_interval=5", "data.split='9,0,1'",
    ]  # fmt: skip
    assert refused({"a": [0, 1], "b": [0, 1]}, *overrides) == [
        "e.yaml: parallel.tensor_model_parallel_size: must divide num_attention_heads 3; got 2; use 1 or 3",
        "e.yaml: parallel.zero_stage: strategy ddp keeps everything on every rank; got 2; set it to 0, or strategy to zero",  # noqa: E501
        "e.yaml: model.num_attention_heads: must divide hidden_size 8; got 3; use 2 or 4, or set model.kv_channels",
        "e.yaml: model.max_position_embeddings: must be at least seq_length 16; got 8; raise it to 16, or leave it out",
        "e.yaml: batch.global_batch_size: must be a multiple of micro_batch_size 2 x data parallel size 2; got 7; "
        "use 4 or 8, or leave it out",
        "e.yaml: optimizer.lr_warmup_fraction: cannot be given beside lr_warmup_iters; got 0.1; "
        "leave one of the two out",
        "e.yaml: optimizer.lr_warmup_iters: must be less than lr_decay_iters 30; got 30; lower it",
        "e.yaml: optimizer.min_lr: must not exceed lr 0.00015; got 1; lower it",
        "e.yaml: data.split: leaves no data for validation every 5 iterations; got 9,0,1; "
        "give validation a share, or set train.eval_interval to 0",
        "e.yaml: env.CUDA_VISIBLE_DEVICES: chooses GPUs of a node, not of an experiment; got '0'; "
        "set it in the shell for tridock train, or in nodes.<name>.env of the cluster's settings for tridock launch",
    ]


def test_a_layout_must_fill_the_slots() -> None:
    assert refused({"a": [0, 1, 2]}, "parallel.pipeline_model_parallel_size=2")[1] == (
        "e.yaml: parallel: tensor x pipeline size 2 must divide the 3 slots of the hostfile; got 3 slots; "
        "use TP1 PP1, or 2 or 4 slots"
    )


def test_a_batch_smaller_than_one_pass_is_told_the_smallest() -> None:
    assert refused({"a": range(7)}, "batch.global_batch_size=2") == [
        "e.yaml: batch.global_batch_size: must be a multiple of micro_batch_size 2 x data parallel size 7; got 2; "
        "use 14, or leave it out"
    ]


def test_the_global_batch_left_out_is_one_micro_batch_a_rank() -> None:
    plan = planned({"a": range(5)}, "batch.global_batch_size=null")
    assert (plan.global_batch_size, plan.accumulation_steps) == (10, 1)


def test_nearest_divisors() -> None:
    assert nearest_divisors(60, 32) == (30, 60)
    assert nearest_divisors(8, 9) == (8,)
    assert nearest_divisors(60, 32, multiple_of=4) == (20, 60)
    assert nearest_divisors(60, 32, multiple_of=7) == (30, 60)


def test_nearest_multiples() -> None:
    assert nearest_multiples(4, 10) == (8, 12)
    assert nearest_multiples(4, 3) == (4,)
    assert [nearest_multiple(32, number) for number in (60, 36, 48, 7)] == [64, 32, 64, 32]


def test_several_data_sets_where_one_is_read() -> None:
    blend = "data.data_path=[0.7, a, 0.3, b]"
    of_megatron = ("engine=megatron-deepspeed", "precision=fp32", "data.vocab_file=v", "data.merge_file=m")
    assert "e.yaml: data.data_path: Megatron v1.1.5 reads one data set; got a, b; " in "\n".join(
        refused({"n": [0]}, blend, *of_megatron)
    )
    vision = ("model.preset=resnet50", "parallel.strategy=ddp")
    own = ("data.data_path=null", "data.train_data_path=a", "data.test_data_path=b")
    for data in ((blend,), own):
        assert refused({"n": [0]}, *data, *vision) == [
            "e.yaml: data.data_path: preset resnet50 reads one data set; got a, b; name one data set"
        ]


def test_an_evaluation_needs_data_of_validation() -> None:
    own = ("data.data_path=null", "data.train_data_path=a", "train.eval_interval=5")
    assert refused({"n": [0]}, *own) == [
        "e.yaml: data.valid_data_path: there is no data for validation every 5 iterations; "
        "name some, or set train.eval_interval to 0"
    ]
