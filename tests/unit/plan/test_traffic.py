"""What the ranks of a layout send: by hand for small cases, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.engines import ENGINES, cost_model_of
from tridock.engines.deepspeed import REUSED
from tridock.experiment import Experiment
from tridock.gpus import GPUS
from tridock.layout.shape import LayoutShape
from tridock.layout.traffic import Traffic, all_gather, all_reduce
from tridock.plan.rates import Rates

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, CP, SP = "virtual_pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def experiment(
    parallel: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    *,
    engine: str = "megatron-core",
    precision: str = "bf16",
) -> Experiment:
    """Of 4 layers of width 8, 16 tokens, and micro batches of 2: 512 bytes of hidden states in bf16."""
    small = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 100}
    fields = {
        "name": "tiny",
        "engine": engine,
        "precision": precision,
        "model": {**small, "make_vocab_size_divisible_by": 4, **(model or {})},
        "parallel": dict(parallel),
        "batch": {"micro_batch_size": 2},
        "data": {"data_path": "data/x", "vocab_file": "v", "merge_file": "m"},
        "train": {"train_iters": 1},
    }
    if engine != "megatron-deepspeed":
        fields["data"] = {"data_path": "data/x"}
    return Experiment.model_validate(fields)


def volumes(given: Experiment, data: int = 1, accumulation: int = 1, stage: int = 0) -> dict[str, int]:
    """Bytes of each group."""
    sent = cost_model_of(given).traffic_of_stage(given, LayoutShape(data, accumulation, 64), stage)
    return {one.group: one.bytes_per_rank for one in sent}


HIDDEN = 16 * 2 * 8 * 2
LAYER = 12 * 64 + 13 * 8  # weights
TABLES = 100 * 8 + 16 * 8


def test_rings() -> None:
    assert [all_reduce(size, 12.0) for size in (1, 2, 4)] == [0.0, 12.0, 18.0]
    assert [all_gather(size, 12.0) for size in (1, 2, 4)] == [0.0, 6.0, 9.0]


@pytest.mark.parametrize(
    ("parallel", "model", "expected"),
    [
        # Each layer four times, the embedding and the head once; three fp32 numbers a token for the loss.
        ({TP: 2}, {}, 18 * HIDDEN + 3 * 4 * 32),
        ({TP: 2}, SELECTIVE, 18 * HIDDEN + 3 * 4 * 32),
        ({TP: 2}, FULL, 26 * HIDDEN + 3 * 4 * 32),
        # A layer's 6 gathers and 4 scatters, the embedding's reduction and gather, the head's two gathers and scatter;
        # and once, six vectors a layer and the last norm's two, in fp32.
        ({TP: 2, SP: True}, {}, 23 * HIDDEN + 3 * 4 * 32 + 26 * 8 * 4),
        ({TP: 4, SP: True}, {}, 1.5 * (23 * HIDDEN + 3 * 4 * 32 + 26 * 8 * 4)),
    ],
)
def test_tensor_parallelism(parallel: dict[str, Any], model: dict[str, Any], expected: float) -> None:
    assert volumes(experiment(parallel, model)) == {"tensor": expected}


@pytest.mark.parametrize(("model", "passes"), [({}, 2), (SELECTIVE, 3), (FULL, 3)])
def test_context_parallelism_gathers_keys_and_values(model: dict[str, Any], passes: int) -> None:
    sent = volumes(experiment({CP: 4, TP: 2}, model))["context"]
    assert sent == passes * 4 * 0.75 * 2 * HIDDEN / 2
    weights = LAYER * 4 + TABLES + 16
    assert volumes(experiment({CP: 4}))["data"] == 1.5 * 4 * weights


@pytest.mark.parametrize(("stage", "messages"), [(0, 1), (1, 2), (2, 2), (3, 1)])
def test_a_pipeline_sends_one_way_at_its_ends(stage: int, messages: int) -> None:
    sent = volumes(experiment({PP: 4}), accumulation=8, stage=stage)
    ends = {"embedding": 4 * 100 * 8} if messages == 1 else {}
    assert sent == {"pipeline": 8 * messages * HIDDEN, **ends}


def test_an_interleaved_pipeline_sends_after_every_run() -> None:
    given = experiment({PP: 2, VPP: 2, TP: 2, SP: True})
    assert [volumes(given, accumulation=4, stage=stage)["pipeline"] for stage in (0, 1)] == [4 * 3 * HIDDEN // 2] * 2
    (pipeline,) = [one for one in cost_model_of(given).traffic(given, LayoutShape(1, 4, 8)) if one.group == "pipeline"]
    assert pipeline.waits == 2 * (2 * 4 + 1) * HIDDEN // 2


def test_the_stage_that_sends_most_is_named() -> None:
    given, shape = experiment({PP: 4, TP: 2}), LayoutShape(1, 4, 8)
    reported = {one.group: one.bytes_per_rank for one in cost_model_of(given).traffic(given, shape)}
    stages = [volumes(given, accumulation=4, stage=stage) for stage in range(4)]
    assert reported == {group: max(stage.get(group, 0) for stage in stages) for group in stages[0]}
    assert reported["pipeline"] == stages[1]["pipeline"] > stages[0]["pipeline"]
    assert reported["tensor"] == stages[3]["tensor"] > stages[0]["tensor"] > stages[1]["tensor"]


def test_megatron_v115_sends_parts_between_stages_and_the_mask() -> None:
    given = experiment({PP: 3, TP: 2}, engine="megatron-deepspeed", precision="fp16")
    first, middle, last = (volumes(given, stage=stage) for stage in range(3))
    mask = 2 * 16 * 16
    assert [stage["pipeline"] for stage in (first, middle, last)] == [HIDDEN // 2 + mask, HIDDEN + mask, HIDDEN // 2]
    # Two layers on the first stage, whose outputs and their gradients are gathered; inputs on the others.
    assert first["tensor"] == 9 * HIDDEN + 2 * HIDDEN // 2
    assert middle["tensor"] == 4 * HIDDEN + 3 * HIDDEN // 2
    assert last["tensor"] == 5 * HIDDEN + HIDDEN // 2 + 3 * 4 * 32


def test_megatron_v115_gathers_what_it_stores_in_parts() -> None:
    stored = {"checkpoint_activations": True, "checkpoint_num_layers": 2}
    whole, parts = (
        volumes(experiment({TP: 4}, {**stored, "partition_activations": parts}, engine="megatron-deepspeed"))["tensor"]
        for parts in (False, True)
    )
    assert whole == 1.5 * (26 * HIDDEN + 3 * 4 * 32)
    assert parts - whole == 2 * 0.75 * HIDDEN


WEIGHTS = LAYER * 4 + TABLES + 16  # without rows that pad the vocabulary


@pytest.mark.parametrize(
    ("engine", "precision", "parallel", "accumulation", "bytes_a_weight"),
    [
        ("megatron-core", "bf16", {}, 3, 1.5 * 4),
        ("megatron-core", "bf16", {"use_distributed_optimizer": True}, 3, 0.75 * (4 + 2)),
        ("torch", "bf16", {"strategy": "ddp"}, 3, 1.5 * 4),
        ("megatron-deepspeed", "fp16", {"strategy": "ddp"}, 3, 1.5 * 2),
        ("torch", "fp32", {"zero_stage": 0}, 3, 1.5 * 4),
        ("torch", "bf16", {"zero_stage": 0}, 3, 1.5 * 2),
        ("torch", "bf16", {"zero_stage": 1}, 3, 1.5 * 2 + 0.75 * 2),
        ("torch", "bf16", {"zero_stage": 2}, 1, 1.5 * 2 + 0.75 * 2),
        ("torch", "bf16", {"zero_stage": 2}, 3, 3 * 1.5 * 2 + 0.75 * 2),
        ("torch", "bf16", {"zero_stage": 3}, 3, 3 * 2 * 0.75 * 2),
    ],
)  # fmt: skip
def test_gradients_and_weights(
    engine: str, precision: str, parallel: dict[str, Any], accumulation: int, bytes_a_weight: float
) -> None:
    sent = volumes(experiment(parallel, engine=engine, precision=precision), data=4, accumulation=accumulation)
    assert sent == {"data": WEIGHTS * bytes_a_weight}


def test_zero3_gathers_again_what_it_cannot_keep() -> None:
    model = {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 20, "seq_length": 1024}
    given = experiment({"zero_stage": 3}, model, engine="torch")
    weights = 48 * (12 * 1600**2 + 13 * 1600) + 100 * 1600 + 1024 * 1600 + 3200
    assert weights > REUSED // 2
    again = weights - REUSED // 2
    assert volumes(given, data=2) == {"data": round((2 * weights + again) * 2 / 2)}


def by_group(found: list[Traffic]) -> dict[str, Traffic]:
    return {one.group: one for one in found}


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        # Ranks lie in the order tensor, pipeline, data: strides 1, 2, 4 of 16.
        (16, {"tensor": ("node", 1), "pipeline": ("node", 2), "embedding": ("node", 2), "data": ("node", 4)}),
        (8, {"tensor": ("node", 1), "pipeline": ("node", 2), "embedding": ("node", 2), "data": ("network", 4)}),
        (4, {"tensor": ("node", 1), "pipeline": ("node", 2), "embedding": ("node", 2), "data": ("network", 4)}),
        (2, {"tensor": ("node", 1), "pipeline": ("network", 2), "embedding": ("network", 2), "data": ("network", 2)}),
    ],
)
def test_links_where_stages_are_neighbours(slots: int, expected: dict[str, tuple[str, int]]) -> None:
    sizes = {TP: 2, PP: 2, "use_tp_pp_dp_mapping": True}
    found = by_group(ENGINES["megatron-core"].cost_model.traffic(experiment(sizes), LayoutShape(4, 2, slots)))
    assert {group: (found[group].link, found[group].sharing) for group in expected} == expected


@pytest.mark.parametrize(("slots", "link"), [(16, "node"), (8, "node"), (4, "network")])
def test_the_first_and_the_last_stage_are_on_one_node_where_the_pipeline_is(slots: int, link: str) -> None:
    given = experiment({PP: 4}, {"num_layers": 4})
    found = by_group(ENGINES["megatron-core"].cost_model.traffic_of_stage(given, LayoutShape(2, 1, slots), 0))
    assert (found["embedding"].link, found["pipeline"].link == "network") == (link, slots == 4)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        # Ranks lie in the order tensor, context, data, pipeline: strides 1, 2, 4, 8 of 16.
        (16, {"tensor": ("node", 1), "context": ("node", 2), "pipeline": ("node", 8), "data": ("node", 2)}),
        (8, {"tensor": ("node", 1), "context": ("node", 2), "pipeline": ("network", 8), "data": ("node", 2)}),
        (4, {"tensor": ("node", 1), "context": ("node", 2), "pipeline": ("network", 4), "data": ("network", 2)}),
        (2, {"tensor": ("node", 1), "context": ("network", 2), "pipeline": ("network", 2), "data": ("network", 2)}),
        (1, {"tensor": ("network", 1), "context": ("network", 1), "pipeline": ("network", 1), "data": ("network", 1)}),
    ],
)
def test_links_and_who_shares_them(slots: int, expected: dict[str, tuple[str, int]]) -> None:
    found = by_group(
        ENGINES["megatron-core"].cost_model.traffic(experiment({TP: 2, CP: 2, PP: 2}), LayoutShape(2, 2, slots))
    )
    assert {group: (found[group].link, found[group].sharing) for group in expected} == expected
    assert found["embedding"].link == found["pipeline"].link
    assert {group: found[group].size for group in found} == {
        "tensor": 2, "context": 2, "pipeline": 2, "data": 4, "embedding": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("gpu", "slower"), [("a100-pcie", 0.69 / 0.42 * 2), ("a100-80gb", 1.0)])
def test_groups_share_the_way_between_the_halves_of_a_node_without_a_switch(gpu: str, slower: float) -> None:
    """Two rings of four ranks: side by side, one in each half of the node, or each through both."""
    rates = Rates.of(GPUS[gpu], "bf16", None, None)
    beside, through = (Traffic("data", 4, "node", sharing, 10**9, 10**9) for sharing in (1, 2))
    assert rates.carried(through, 1e9) / rates.carried(beside, 1e9) == pytest.approx(slower)


@pytest.mark.parametrize(("gpu", "slower"), [("v100-32gb", 3.0), ("a100-80gb", 1.0)])
def test_two_gpus_have_few_links_without_a_switch(gpu: str, slower: float) -> None:
    rates = Rates.of(GPUS[gpu], "fp16", None, None)
    two, four = (Traffic("tensor", size, "node", 1, 10**9, 10**9) for size in (2, 4))
    assert rates.carried(two, 1e9) / rates.carried(four, 1e9) == pytest.approx(slower)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int, int, int]:
    """Of megatron-core: the layout, replicas, micro batches of a step, slots of a node."""
    tensor, stages = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4)))
    parallel = {
        TP: tensor,
        PP: stages,
        CP: draw(st.sampled_from((1, 2, 4))),
        SP: tensor > 1 and draw(st.booleans()),
        "use_distributed_optimizer": draw(st.booleans()),
    }
    return parallel, draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 9)), draw(st.sampled_from((1, 2, 4, 8, 16)))


@given(layouts())
def test_what_holds_everywhere(case: tuple[dict[str, Any], int, int, int]) -> None:
    parallel, data, steps, slots = case
    given = experiment(parallel)
    found, more = (
        by_group(cost_model_of(given).traffic(given, LayoutShape(data, count, slots))) for count in (steps, steps + 1)
    )
    sizes = {"tensor": parallel[TP], "context": parallel[CP], "pipeline": parallel[PP]}
    sizes |= {"data": data * parallel[CP], "embedding": min(2, parallel[PP])}
    assert {group: one.size for group, one in found.items()} == {g: size for g, size in sizes.items() if size > 1}
    for group, one in found.items():
        assert one.bytes_per_rank > 0
        assert 1 <= one.sharing <= slots
        assert one.link == "network" or one.span <= slots
        # Gradients are exchanged once an iteration, whatever is accumulated; all else with every micro batch.
        once = group in ("data", "embedding")
        assert (more[group].bytes_per_rank == one.bytes_per_rank) == once
        assert more[group].bytes_per_rank >= one.bytes_per_rank
        assert one.link == "network" or one.size <= slots
