"""RMSNorm without a kernel, as in torch 2.6, in the plan of GPUs whose base image has that torch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experiments import with_fields
from tridock.gpus import GPUS
from tridock.plan import Assumptions, assess

TOKENS, HIDDEN, LAYERS = 2 * 512, 1024, 4
BASE: dict[str, Any] = {
    "name": "t",
    "precision": "fp16",
    "model": {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 8, "seq_length": 512},
    "parallel": {"strategy": "ddp"},
    "batch": {"micro_batch_size": 2},
    "data": {"data_path": "data/x"},
    "train": {"train_iters": 1},
}
RMS = {"model.normalization": "RMSNorm"}


def kept(fields: dict[str, Any], gpu: str) -> int:
    """The bytes of activations."""
    assessed = assess(with_fields(BASE, fields), {"a": range(1)}, "t", Assumptions(GPUS[gpu]))
    assert not assessed.problems
    return sum(term.bytes for term in assessed.memory[0].terms if term.name == "activations")


@pytest.mark.parametrize("engine", ["torch", "megatron-core"])
def test_a_norm_keeps_4_bytes_more_for_each_element(engine: str) -> None:
    fields = {**RMS, "engine": engine, **({"model.transformer_impl": "local"} if engine == "megatron-core" else {})}
    assert kept(fields, "v100-32gb") - kept(fields, "t4") == 4 * TOKENS * HIDDEN * 2 * LAYERS
    # Queries and keys
    normed = {**fields, "model.qk_layernorm": True}
    assert kept(normed, "v100-32gb") - kept(normed, "t4") == 4 * TOKENS * HIDDEN * (2 + 2) * LAYERS


def test_other_norms_and_layers_have_a_kernel() -> None:
    assert kept({}, "v100-32gb") == kept({}, "t4")


def test_a_step_takes_longer_unless_it_is_compiled() -> None:
    def kernels(gpu: str, fields: dict[str, Any]) -> float:
        cost = assess(with_fields(BASE, fields), {"a": range(1)}, "t", Assumptions(GPUS[gpu])).cost
        assert cost is not None
        assert cost.estimate is not None
        return cost.estimate.elementwise

    compiled = {**RMS, "train.compile": True}
    assert kernels("v100-32gb", RMS) > 1.15 * kernels("v100-32gb", {})
    assert kernels("v100-32gb", compiled) == pytest.approx(kernels("v100-32gb", {"train.compile": True}), rel=0.01)
    assert kernels("a100-80gb", RMS) == pytest.approx(kernels("a100-80gb", {}), rel=0.01)
