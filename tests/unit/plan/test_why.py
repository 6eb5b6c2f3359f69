"""Why a layout is better than another: terms, differences and neighbors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experiments import with_fields
from tridock.errors import RequestError
from tridock.experiment import Experiment
from tridock.gpus import GPUS
from tridock.plan import Assumptions, assess
from tridock.plan.search import Candidate, search
from tridock.plan.why import JudgedLayout, difference, judge_layout, neighbors, overrides_of_layout, with_batch_of
from tridock.yaml_text import parse_value

BASE: dict[str, Any] = {
    "name": "small",
    "engine": "megatron-core",
    "model": {
        "num_layers": 12, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 51200,
    },
    "parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "batch": {"micro_batch_size": 2, "global_batch_size": 32},
    "data": {"data_path": "data/x"},
    "precision": "bf16",
    "train": {"train_iters": 3},
}  # fmt: skip
SLOTS = {f"node-{number}": range(4) for number in range(2)}
OFF = {"VPP": "1", "FIRST": "null", "LAST": "null", "CP": "1", "EP": "1", "ETP": "null", "SP": "false"}
"""What a layout by its label does not name."""
A100 = Assumptions(GPUS["a100-40gb"], network_gbit=400.0)


def experiment(**fields: Any) -> Experiment:
    return with_fields(BASE, fields)


def by_change(**fields: Any) -> dict[tuple[str, ...], JudgedLayout]:
    return {other.changes: other for other in neighbors(experiment(**fields), SLOTS, A100).others}


def test_a_layout_is_weighed_as_it_is_planned() -> None:
    judged, planned = judge_layout(experiment(), SLOTS, A100), assess(experiment(), SLOTS, "e", A100)
    assert planned.cost is not None
    assert planned.cost.estimate is not None
    assert (judged.label, judged.verdict) == ("TP2 PP2 DP2 MB2", planned.verdict)
    assert judged.seconds == pytest.approx(planned.cost.estimate.iteration)
    assert sum(judged.time.values()) == pytest.approx(planned.cost.estimate.iteration)
    assert sum(judged.memory_terms.values()) == planned.worst.total_bytes


def test_neighbors_are_one_step_away() -> None:
    changes = set(by_change())
    sizes = "parallel.tensor_model_parallel_size={}", "parallel.pipeline_model_parallel_size={}"
    assert {(size.format(number),) for size in sizes for number in (1, 4)} <= changes
    assert {("batch.micro_batch_size=1",), ("batch.micro_batch_size=4",)} <= changes
    assert ("parallel.sequence_parallel=true",) in changes
    assert ("parallel.use_distributed_optimizer=true",) in changes
    assert ("model.recompute_granularity=selective",) in changes
    assert ("parallel.virtual_pipeline_model_parallel_size=2",) in changes
    assert ("parallel.decoder_first_pipeline_num_layers=7",) in changes
    # And full recomputation, and four stages of which the last has fewer layers.
    assert len(changes) == 13, sorted(changes)


def test_a_change_takes_along_what_it_needs() -> None:
    """Sequence parallelism needs TP; eight ranks have no TP4 PP4."""
    changes = by_change(**{"parallel.sequence_parallel": True, "parallel.pipeline_model_parallel_size": 4})
    assert ("parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false") in changes
    assert ("parallel.tensor_model_parallel_size=4", "parallel.pipeline_model_parallel_size=2") in changes


def test_recomputation_that_the_search_does_not_try_stays_where_sizes_change() -> None:
    every_second = {"model.recompute_granularity": "full", "model.recompute_method": "uniform"}
    changes = by_change(**every_second, **{"model.recompute_num_layers": 2})
    assert ("parallel.tensor_model_parallel_size=1",) in changes
    assert changes["parallel.tensor_model_parallel_size=1",].experiment.model.recompute_num_layers == 2
    assert ("model.recompute_num_layers=1",) in changes


def test_neighbors_keep_the_global_batch_and_come_best_first() -> None:
    why = neighbors(experiment(**{"batch.global_batch_size": None}), SLOTS, A100)
    assert {other.experiment.batch.global_batch_size for other in (why.layout, *why.others)} == {4}
    order = {"fits": 0, "tight": 1, "no-fit": 2, "illegal": 3}
    ranks = [(order[other.verdict], other.seconds or 0.0) for other in why.others]
    assert ranks == sorted(ranks)
    (refused,) = {str(other.problems[0]) for other in why.others if other.changes == ("batch.micro_batch_size=4",)}
    assert refused.startswith(
        "batch.global_batch_size: must be a multiple of micro_batch_size 4 x data parallel size 2;"
    )


def test_differences_add_up() -> None:
    why = neighbors(experiment(), SLOTS, A100)
    for other in why.others:
        if other.problems:
            assert difference(why.layout.time, other.time) == {}
            continue
        assert why.layout.seconds is not None
        assert other.seconds is not None
        time, memory = difference(why.layout.time, other.time), difference(why.layout.memory_terms, other.memory_terms)
        assert sum(time.values()) == pytest.approx(other.seconds - why.layout.seconds, abs=1e-9)
        assert sum(memory.values()) == sum(other.memory_terms.values()) - sum(why.layout.memory_terms.values())
        sizes = [abs(value) for value in time.values()]
        assert sizes == sorted(sizes, reverse=True)
        assert all(sizes)


@pytest.mark.parametrize("engine", ["torch", "megatron-deepspeed"])
def test_neighbors_with_the_other_engines(engine: str) -> None:
    tokenizer = {"vocab_file": "v.json", "merge_file": "m.txt"} if engine == "megatron-deepspeed" else {}
    fields = {"engine": engine, "precision": "fp16", "parallel": {"strategy": "zero", "zero_stage": 1}}
    fields |= {"data": {"data_path": "data/x", **tokenizer}}
    why = neighbors(Experiment.model_validate(BASE | fields), SLOTS, A100)
    assert why.layout.label == "TP1 PP1 DP8 MB2 ZeRO-1"
    stages = {change for other in why.others for change in other.changes if change.startswith("parallel.zero_stage")}
    assert stages == {"parallel.zero_stage=0", "parallel.zero_stage=2"}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("TP4 PP2 DP8 SP", {**OFF, "TP": "4", "PP": "2", "SP": "true"}),
        ("TP1 PP4 FIRST7 LAST5 DP8", {**OFF, "TP": "1", "PP": "4", "FIRST": "7", "LAST": "5"}),
        ("tp2,vpp3", {**OFF, "TP": "2", "VPP": "3"}),
        ("MB4 ZeRO-2", {"MB": "4", "ZERO": "2"}),
        ("parallel.zero_stage=3", {"ZERO": "3"}),
        ("TP2 PP1 EP4 ETP1 DP2", {**OFF, "TP": "2", "PP": "1", "EP": "4", "ETP": "1"}),
        ("MB2 dist", {"MB": "2", "DIST": "true"}),
        ("once precision=bf16", {"ONCE": "true", "precision": "bf16"}),
        ("ZeRO-2 o", {"ZERO": "2", "O": "{device: cpu}"}),
        ("ZeRO-3 op", {"ZERO": "3", "O": "{device: cpu}", "P": "{device: cpu}"}),
        ("deepspeed={a: [1, 2], b: 3},MB2", {"deepspeed": "{a: [1, 2], b: 3}", "MB": "2"}),
    ],
)
def test_a_layout_as_a_user_names_it(text: str, sizes: dict[str, str]) -> None:
    names = {
        "TP": "parallel.tensor_model_parallel_size",
        "PP": "parallel.pipeline_model_parallel_size",
        "VPP": "parallel.virtual_pipeline_model_parallel_size",
        "FIRST": "parallel.decoder_first_pipeline_num_layers",
        "LAST": "parallel.decoder_last_pipeline_num_layers",
        "CP": "parallel.context_parallel_size",
        "EP": "parallel.expert_model_parallel_size",
        "ETP": "parallel.expert_tensor_parallel_size",
        "DIST": "parallel.use_distributed_optimizer",
        "ONCE": "parallel.reduce_gradients_once",
        "O": "deepspeed.zero_optimization.offload_optimizer",
        "P": "deepspeed.zero_optimization.offload_param",
        "SP": "parallel.sequence_parallel",
        "MB": "batch.micro_batch_size",
        "ZERO": "parallel.zero_stage",
    }
    assert set(overrides_of_layout(text)) == {f"{names.get(name, name)}={value}" for name, value in sizes.items()}


def test_every_layout_of_a_search_can_be_named() -> None:
    fields = {"model.num_moe_experts": 4, "model.add_bias_linear": False}
    found = search(experiment(**fields), SLOTS, "e", A100).found[::40]
    assert {"EP4", "ETP1", "VPP3", "dist", "SP"} <= {word for one in found for word in label(one).split()}
    for one in found:
        words = (override.split("=", 1) for override in overrides_of_layout(label(one)))
        named = {path: parse_value(value, "e") for path, value in words}
        recomputed = {path: value for path, value in one.choice.items() if path.startswith("model.")}
        again = judge_layout(experiment(**fields, **recomputed, **named), SLOTS, A100)
        assert (again.label, again.seconds) == (label(one), one.seconds)
        assert again.worst == one.worst


def label(candidate: Candidate) -> str:
    return judge_layout(candidate.experiment, SLOTS, A100).label


def test_what_is_no_layout() -> None:
    todo = "give it as the search prints it, as in 'TP4 PP2 MB2 SP', or by fields, as in batch.micro_batch_size=2"
    with pytest.raises(RequestError) as caught:
        overrides_of_layout("TP4 fast configs/demo.yaml")
    assert str(caught.value) == (
        f"--why: is not a layout; got 'fast'; {todo}\n--why: is not a layout; got 'configs/demo.yaml'; {todo}"
    )
    with pytest.raises(RequestError, match="--why: is not a layout; got ''; give"):
        overrides_of_layout("")


def test_layouts_are_compared_on_the_same_batch() -> None:
    """Two replicas of two samples: as many for four replicas of one."""
    base = experiment(**{"batch.global_batch_size": None})
    other = experiment(**{"batch.global_batch_size": None, "parallel.tensor_model_parallel_size": 1,
                          "batch.micro_batch_size": 1})  # fmt: skip
    assert with_batch_of(base, SLOTS, other).batch.global_batch_size == 4
    assert with_batch_of(base, SLOTS, experiment()).batch.global_batch_size == 32
