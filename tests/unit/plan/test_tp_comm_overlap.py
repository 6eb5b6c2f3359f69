"""Tensor parallel ranks that exchange parts of a matrix beside its products: what the plan refuses and counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experiments import with_fields
from tridock.gpus import GPUS
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.memory import StageMemory

BASE: dict[str, Any] = {
    "name": "t",
    "engine": "megatron-core",
    "precision": "bf16",
    "model": {"num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096},
    "parallel": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "batch": {"micro_batch_size": 2},
    "data": {"data_path": "data/x"},
    "train": {"train_iters": 1},
}
FIELD, SIZE = "parallel.tp_comm_overlap", "parallel.tensor_model_parallel_size"
ASKED = {FIELD: True}


def assessed(fields: dict[str, Any] | None = None, gpu: str = "h100-80gb", slots: int = 8) -> Assessment:
    return assess(with_fields(BASE, fields or {}), {"a": range(slots), "b": range(slots)}, "t", Assumptions(GPUS[gpu]))


def buffers(memory: tuple[StageMemory, ...]) -> int:
    return sum(term.bytes for stage in memory for term in stage.terms if term.name == "tp_comm_overlap")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"parallel.sequence_parallel": False},
            "needs sequence_parallel; got true; set parallel.sequence_parallel to true",
        ),
        (
            {SIZE: 1, "parallel.sequence_parallel": False},
            "needs a tensor_model_parallel_size of 2, 4, 8, 16 or 32; got true; use one of them",
        ),
        (
            {"model.transformer_impl": "local"},
            "needs TransformerEngine's layers; got true; set model.transformer_impl to transformer_engine",
        ),
        ({"precision": "fp16"}, "its kernels sum in bf16; got true; set precision to bf16"),
        (
            {"model.hidden_size": 4112, "model.num_attention_heads": 16},
            "needs a hidden_size that is a multiple of 32; got true; choose another hidden_size",
        ),
    ],
)
def test_what_it_lacks_is_named_if_the_experiment_asks_for_it(fields: dict[str, Any], problem: str) -> None:
    assert [str(it) for it in assessed({**fields, **ASKED}).problems] == [f"{FIELD}: {problem}, or leave it out"]
    by_default = assessed(fields)
    assert not by_default.problems
    assert buffers(by_default.memory) == 0


def test_its_ranks_are_on_one_node() -> None:
    (problem,) = assessed({**ASKED, SIZE: 8}, slots=4).problems
    assert str(problem) == (
        f"{FIELD}: needs tensor parallel ranks on one node; got 8 ranks on nodes with 4 slots; "
        "lower tensor_model_parallel_size, or leave it out"
    )
    by_default = assessed({SIZE: 8}, slots=4)
    assert not by_default.problems
    assert buffers(by_default.memory) == 0


def test_gpus_without_multicast() -> None:
    (problem,) = assessed(ASKED, "a100-80gb").problems
    assert str(problem) == (
        f"{FIELD}: a a100-80gb has no CUDA multicast (Hopper and newer, with NVSwitch); got true; "
        "leave it out, or set UB_SKIPMC: 1 in env to use CUDA IPC over NVLink"
    )
    by_ipc = assessed({**ASKED, "env": {"UB_SKIPMC": "1"}}, "a100-80gb")
    assert not by_ipc.problems
    assert buffers(by_ipc.memory) > 0
    assert buffers(assessed(gpu="a100-80gb").memory) == 0


def test_its_buffers_are_memory_of_a_rank_but_not_of_torch() -> None:
    on, off = assessed(), assessed({FIELD: False})
    rows = 2 * 4096
    workspaces = 3 * ((32 << 20) + 1024)
    assert buffers(on.memory) == 12 * 2 * rows * 4096 + workspaces
    assert on.memory[0].total_bytes - off.memory[0].total_bytes == buffers(on.memory)
    fp8 = assessed({"model.fp8": "hybrid"})
    assert buffers(fp8.memory) == (8 * 1 + 4 * 2) * rows * 4096 + workspaces


def test_the_products_of_a_layer_hide_its_exchanges() -> None:
    """All but their latency, and the last piece of each reduce-scatter."""

    def inside(fields: dict[str, Any], gpu: str = "h100-80gb") -> float:
        cost = assessed(fields, gpu).cost
        assert cost is not None
        assert cost.estimate is not None
        return cost.estimate.tensor_and_context

    on, off = inside({}), inside({FIELD: False})
    assert 0 < on < 0.6 * off
    assert inside(ASKED) == on
    assert inside({}, "a100-80gb") == inside({FIELD: False}, "a100-80gb")
