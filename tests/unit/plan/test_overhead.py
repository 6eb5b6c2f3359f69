"""Memory beyond the tensors of a run, the interval, and the verdicts on it; against published runs where they tell."""

import statistics
from typing import Any

import pytest

from tests.experiments import with_fields
from tests.planner.compare import planned, tables
from tridock.gpus import GPUS
from tridock.plan import Assumptions, assess
from tridock.plan.memory import GIB, StageMemory, tensor_bytes

RUNS = ("bloom-181b-feb-21", "bloom-181b-feb-25", "bloom-200b", "bloom-176b")
ZERO3: dict[str, Any] = {
    "name": "zero3",
    "engine": "megatron-deepspeed",
    "precision": "fp16",
    "model": {
        "num_layers": 64, "hidden_size": 8192, "num_attention_heads": 64, "seq_length": 1024,
        "checkpoint_activations": True,
    },
    "parallel": {"strategy": "zero", "zero_stage": 3, "tensor_model_parallel_size": 4},
    "batch": {"micro_batch_size": 24, "global_batch_size": 384},
    "data": {"data_path": "data/x", "vocab_file": "v", "merge_file": "m"},
    "train": {"train_iters": 1},
}  # fmt: skip
NODES = {f"node-{number}": range(4) for number in range(16)}


def published() -> list[tuple[StageMemory, float]]:
    """The fullest stage of each run whose memory was published, and that, in GiB."""
    found = []
    for table in tables():
        for values in table["rows"] if table["name"] in RUNS else ():
            row = {**table["fields"], **dict(zip(table["columns"], values, strict=True))}
            if row["memory"] is not None:
                found.append((planned(table, row).worst, row["memory"]))
    return found


def test_the_upper_end_is_what_large_pipelines_were_seen_to_use() -> None:
    errors = [stage.total_bytes / GIB / seen - 1 for stage, seen in published()]
    assert len(errors) > 40
    assert abs(statistics.median(errors)) < 0.03
    assert statistics.median(map(abs, errors)) < 0.05
    assert max(map(abs, errors)) < 0.12


def test_no_run_above_80_percent_is_said_to_fit_and_none_that_ran_is_refused() -> None:
    verdicts = {seen: stage.fit for stage, seen in published()}
    assert {fit for seen, fit in verdicts.items() if seen > 0.8 * 80} == {"tight"}
    assert "no-fit" not in verdicts.values()


def worst(gpu: str, **fields: Any) -> StageMemory:
    changed = {path.replace("__", "."): value for path, value in fields.items()}
    return assess(with_fields(ZERO3, changed), NODES, "e", Assumptions(GPUS[gpu])).worst


def test_a_verdict_is_that_of_the_upper_end_unless_the_gpu_holds_not_even_the_lower() -> None:
    stage = worst("a100-80gb", batch__micro_batch_size=36, batch__global_batch_size=576)
    assert stage.least_bytes < stage.total_bytes
    assert (stage.fit, stage.share is not None and stage.share > 0.8) == ("tight", True)
    # What the GPU has no room for is not counted, unless it is needed.
    assert stage.total_bytes <= GPUS["a100-80gb"].memory_bytes
    small = worst("v100-32gb")
    assert small.fit == "no-fit"
    assert small.least_bytes > GPUS["v100-32gb"].memory_bytes


def activation_bytes(stage: StageMemory) -> int:
    return next((term.bytes for term in stage.terms if term.name == "activations"), 0)


def test_stored_activations_are_partitioned_or_leave_the_gpu() -> None:
    """52B under ZeRO 3 ran on V100 with 32 GB with the latter (bigscience, experiments/gpt2.md)."""
    whole = activation_bytes(worst("v100-32gb"))
    assert whole == 64 * 24 * 1024 * 8192 * 2
    assert activation_bytes(worst("v100-32gb", model__partition_activations=True)) == whole / 4
    both = worst("v100-32gb", model__partition_activations=True, model__checkpoint_in_cpu=True)
    assert activation_bytes(both) == 0
    assert both.fit == "tight"


def test_zero_3_never_has_the_whole_model() -> None:
    """104 GB of weights on GPUs of 32, without tensor parallelism: each rank keeps its part of a tensor."""
    alone = {"parallel__tensor_model_parallel_size": 1, "batch__micro_batch_size": 1, "batch__global_batch_size": 64}
    stage = worst("v100-32gb", **alone)
    assert 2 * stage.parameters.total > 12 * stage.startup_bytes
    assert stage.fit == "fits"


def test_unfused_attention_keeps_its_scores() -> None:
    """5 a s^2 b bytes of each kept layer in fp16 (Korthikanti et al., 2022, 4.1); of layers that are computed again,
    only while one is at work."""
    kept = {"model__num_layers": 8, "model__checkpoint_activations": False, "batch__micro_batch_size": 1}

    def scores(**fields: Any) -> int:
        fused, unfused = (
            assess(with_fields(ZERO3, {path.replace("__", "."): value for path, value in fields.items()}), NODES, "e",
                   Assumptions(GPUS["a100-80gb"], attention=attention)).worst
            for attention in ("fused", "unfused")
        )  # fmt: skip
        return tensor_bytes(unfused.terms) - tensor_bytes(fused.terms)

    fused_too = 4 * 1024 * 64 // 4  # a number a row, instead of the scores
    assert scores(**kept) == 8 * (5 * 64 // 4 * 1024**2 - fused_too)
    assert scores(**kept, model__attention_dropout=0.0) == 8 * (2 * 64 // 4 * 1024**2 - fused_too)
    again = scores(**kept | {"model__checkpoint_activations": True, "batch__micro_batch_size": 8})
    assert 0 <= again <= 8 * 5 * 64 // 4 * 1024**2


def test_overhead_grows_with_communicators_and_with_what_comes_and_goes() -> None:
    def term(stage: StageMemory, name: str) -> int:
        return next(term.bytes for term in stage.terms if term.name == name)

    one = {"parallel__tensor_model_parallel_size": 1, "batch__micro_batch_size": 1, "model__num_layers": 8}
    few, more = worst("h200", **one), worst("h200", **(one | {"parallel__tensor_model_parallel_size": 4}))
    assert term(more, "NCCL") > term(few, "NCCL")
    assert term(worst("h200", **(one | {"batch__micro_batch_size": 6})), "fragmentation") > term(few, "fragmentation")


@pytest.mark.parametrize("name", ["CUDA context", "NCCL", "fragmentation"])
def test_each_overhead_has_its_source(name: str) -> None:
    (term,) = (term for term in worst("a100-80gb").terms if term.name == name)
    assert term.source
    assert term.least is not None
    assert term.least < term.bytes


@pytest.mark.parametrize(
    ("fields", "elements"),
    [
        ({}, 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672),
        ({"model.num_moe_experts": 4, "model.ffn_hidden_size": 2048, "parallel.expert_tensor_parallel_size": 1},
         8192 * (8192 + 2 * 1024) + 8192 * 8192 + 2 * 3 * 8192 * 2048),
        ({"model.transformer_impl": "local"}, 0),
    ],
)  # fmt: skip
def test_transformer_engine_keeps_an_empty_gradient_of_each_shape(fields: dict[str, Any], elements: int) -> None:
    table = next(table for table in tables() if table["name"] == "simumax-b200-70b")
    row = {
        **table["fields"], "parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True,
        "batch.global_batch_size": 16, **fields,
    }  # fmt: skip
    terms = {term.name: term.bytes for term in planned(table, row).worst.terms}
    assert terms.get("empty gradients", 0) == 2 * elements // 2


@pytest.mark.parametrize(("experts", "ranks", "others"), [(8, 8, 7), (4, 8, 3), (8, 4, 3), (1, 8, 0)])
def test_an_all_to_all_has_buffers_for_every_other_rank_of_the_node(experts: int, ranks: int, others: int) -> None:
    """3.28 GB with eight H100 (NVIDIA/nccl, issue 1685), instead of a group's 500 MiB."""
    table = next(table for table in tables() if table["name"] == "megatron-lm-h100-mixtral") | {"gpu": "b200"}
    row = table["fields"] | {"gpus": 64, "slots": ranks, "parallel.expert_model_parallel_size": experts}
    memory = planned(table, row | {"batch.micro_batch_size": 1}).worst
    (term,) = (term for term in memory.terms if term.name == "NCCL")
    count = (term.least or 0) // (150 << 20)
    assert term.bytes == count * (500 << 20) + max(0, others * (448 << 20) - (500 << 20))
