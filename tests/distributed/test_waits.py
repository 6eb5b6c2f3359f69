"""No step waits for the device: the budget of each strategy, with what the libraries themselves wait for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.legality import case
from tests.distributed.ranks import ask

pytest.importorskip("torch")
pytest.importorskip("deepspeed", exc_type=ImportError)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
BATCH = {"micro_batch_size": 1, "global_batch_size": 2}


def waits(engine: str, cases: list[tuple[int, dict[str, Any], str]]) -> list[Any]:
    model = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    made = [case(engine, world, model, parallel, precision=kind, batch=BATCH) for world, parallel, kind in cases]
    imports = "megatron-core" if engine == "megatron-core" else "deepspeed"
    return [json.loads(line) for line in ask(("waits",), imports, made)]


def test_engine_torch() -> None:
    layouts = [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "ddp", TP: 2}, {"strategy": "ddp", PP: 2}]
    ddp, fsdp, tensor, stages = waits("torch", [(2, parallel, "fp16") for parallel in layouts])
    assert (ddp, fsdp, stages) == ({}, {}, {})
    assert tensor == {"lift_fresh gpt.py:forward": 2}  # torch's vocabulary parallel embedding, in each micro-batch


def test_zero() -> None:
    """The loss scale of stage 0 is Tridock's own, and on the host: DeepSpeed wants a number."""
    zero, one = waits("torch", [(2, {"strategy": "zero", "zero_stage": stage}, "bf16") for stage in (0, 2)])
    assert zero == {"_local_scalar_dense strategies.py:step": 1, "lift_fresh strategies.py:step": 1}
    assert one == {}


def test_megatron_core() -> None:
    pytest.importorskip("megatron.core")
    layouts: list[dict[str, Any]] = [{TP: 2}, {PP: 2}, {"use_distributed_optimizer": True}]
    assert waits("megatron-core", [(2, parallel, "bf16") for parallel in layouts]) == [{}] * 3
