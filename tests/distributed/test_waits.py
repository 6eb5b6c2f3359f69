"""No step waits for the device: the budget of each strategy, with what the libraries themselves wait for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.legality import case
from tests.distributed.ranks import ask
from tests.megatron_source import patched_source

pytest.importorskip("torch")
pytest.importorskip("deepspeed", exc_type=ImportError)

pytestmark = pytest.mark.distributed

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
BATCH = {"micro_batch_size": 1, "global_batch_size": 2}


SAVES = {"train_iters": 3, "log_interval": 100, "save": True, "save_interval": 100, "tensorboard": True}


def waits(
    engine: str,
    cases: list[tuple[int, dict[str, Any], str]],
    *program: str,
    model: dict[str, Any] | None = None,
    **others: Any,
) -> list[Any]:
    model = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **(model or {})}
    made = [
        case(engine, world, model, parallel, precision=kind, batch=BATCH, **others) for world, parallel, kind in cases
    ]
    imports = "megatron-core" if engine == "megatron-core" else "deepspeed"
    return [json.loads(line) for line in ask(program or ("waits",), imports, made)]


def test_engine_torch() -> None:
    layouts = [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "ddp", TP: 2}, {"strategy": "ddp", PP: 2}]
    ddp, fsdp, tensor, stages = waits("torch", [(2, parallel, "fp16") for parallel in layouts])
    assert (ddp, fsdp, stages) == ({}, {}, {})
    assert tensor == {"lift_fresh gpt.py:forward": 2}  # torch's vocabulary parallel embedding, in each micro-batch


def test_experts_of_engine_torch() -> None:
    """Each layer reads once, in each micro-batch, how many tokens every expert takes."""
    model = {"num_moe_experts": 4, "num_layers": 2}
    assert waits("torch", [(2, {"strategy": "fsdp"}, "bf16")], model=model) == [{"tolist gpt.py:_mixture": 2}]


def test_zero() -> None:
    """The loss scale of stage 0 is Tridock's own, and on the host: DeepSpeed wants a number."""
    zero, one = waits("torch", [(2, {"strategy": "zero", "zero_stage": stage}, "bf16") for stage in (0, 2)])
    assert zero == {"_local_scalar_dense strategies.py:step": 1, "lift_fresh strategies.py:step": 1}
    assert one == {}


def test_megatron_core() -> None:
    pytest.importorskip("megatron.core")
    layouts: list[dict[str, Any]] = [{TP: 2}, {PP: 2}, {"use_distributed_optimizer": True}]
    assert waits("megatron-core", [(2, parallel, "bf16") for parallel in layouts]) == [{}] * 3


def test_megatron_v115(tmp_path: Path) -> None:
    """Its program in an iteration without a log line, checkpoints on."""
    source = str(patched_source(tmp_path / "source"))
    layouts: list[Any] = [(2, {"strategy": "ddp"}, "fp32"), (2, {"strategy": "zero"}, "fp32")]
    layouts += [(2, {"strategy": "zero", "zero_stage": stage}, "fp16") for stage in (1, 2)]
    ddp, *zero = waits("megatron-deepspeed", layouts, "waits_v115", source, train=SAVES)
    # The flag was copied to the host before; its vocabulary parallel loss sets masked elements to zero.
    every = {"_local_scalar_dense process_group.py:<lambda>": 1, "lift_fresh cross_entropy.py:forward": 2}
    assert ddp == every | {"synchronize": 1}  # upstream's, after its all-reduce of the gradients
    assert zero == [every] * 3
