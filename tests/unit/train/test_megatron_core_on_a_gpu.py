"""Engine megatron-core on a pretended GPU: every layout steps, reads one number a step, and resumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.unit.train.experiments import experiment
from tests.unit.train.pretended_experts import balanced
from tests.unit.train.pretended_gpu import GPU, REASON, Transfers, pretended_gpu
from tridock.errors import RequestError

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.filterwarnings("ignore"),  # megatron-core's, of what this image lacks
]

FULL = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "alone": ({}, 1, 0),
    "fp32": ({"precision": "fp32"}, 1, 0),
    "fp16": ({"precision": "fp16"}, 2, 0),
    "distributed optimizer": ({"parallel.use_distributed_optimizer": True}, 2, 1),
    "tensor and sequence": ({"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}, 4, 1),
    "last stage": ({"parallel.pipeline_model_parallel_size": 2}, 2, 1),
    "context": ({"parallel.context_parallel_size": 2}, 2, 1),
    "recomputed": (FULL, 1, 0),
    "Llama": (
        {"model.normalization": "RMSNorm", "model.swiglu": True, "model.position_embedding_type": "rope"}
        | {"model.add_bias_linear": False, "model.untie_embeddings_and_output_weights": True},
        1,
        0,
    ),
    "experts": (
        {"model.num_moe_experts": 4, "model.add_bias_linear": False, "parallel.expert_model_parallel_size": 2},
        2,
        1,
    ),
}
OF_EVERY_EDIT = ("tensor and sequence", "experts")


@contextmanager
def on_gpu(name: str) -> Iterator[tuple[Any, Any, list[Tensor]]]:
    """Two strategies, and the batches of a step."""
    from tridock.compat import megatron_core

    megatron_core.prepare("cuda", 8)
    from megatron.core.distributed import param_and_grad_buffer

    from tridock.train.megatron_core.layout import Layout
    from tridock.train.megatron_core.strategy import MegatronCore

    fields, world_size, rank = CASES[name]
    base = {"engine": "megatron-core", "parallel.strategy": "ddp", "precision": "bf16", "model.hidden_dropout": 0.1}
    made = experiment(**base | fields)
    # The operator for several tensors has no form for fake ones; those for one do.
    one_by_one = mock.patch.object(param_and_grad_buffer, "_coalescing_manager", return_value=nullcontext(mock.Mock()))
    with pretended_gpu(world_size, rank) as (ranks, fakes), one_by_one, balanced(made):
        layout = Layout.form(made.parallel)
        resolved = made.resolved(layout.data_parallel_size)
        count = resolved.batch.global_batch_size // (resolved.batch.micro_batch_size * layout.data_parallel_size)
        with fakes, Transfers(on_host=1):  # Adam's steps, by which it divides
            layout.reseed(1, 0)
            both = [MegatronCore(resolved, 96, 128, layout, ranks) for _ in range(2)]
            yield *both, [torch.zeros(2, 9, dtype=torch.int64, device=GPU) for _ in range(count)]


@pytest.mark.parametrize(
    "name", [name if name in OF_EVERY_EDIT else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_a_step_reads_the_norm_of_the_gradient_and_nothing_else(name: str) -> None:
    with on_gpu(name) as (strategy, _, batches):
        strategy.step(batches, 0.1)
        with Transfers(on_host=1) as transfers:
            step = strategy.step(batches, 0.1)
        assert step.loss.device == GPU
        assert {it.device for chunk in strategy.chunks for it in chunk.parameters()} == {GPU}
        # megatron-core clips on the host, and asks on it whether fp16 overflowed.
        assert transfers.all() == {"read": 2 if name == "fp16" else 1}


def test_layers_of_transformer_engine_are_refused_where_it_is_missing() -> None:
    CASES["without"] = ({"model.transformer_impl": "transformer_engine"}, 1, 0)
    what = "model.transformer_impl: needs TransformerEngine, and this rank lacks the package transformer_engine"
    with pytest.raises(RequestError, match=what), on_gpu("without"):
        pass


def test_the_distributed_optimizer_resumes() -> None:
    from tridock.train.megatron_core import checkpoint

    with on_gpu("distributed optimizer") as (stepped, resumed, batches):
        stepped.step(batches, 0.1)
        for optimizer in resumed.optimizer.chained_optimizers:
            checkpoint.before_load(optimizer)
            checkpoint.after_load(optimizer)
        assert kinds(resumed) == kinds(stepped)
        settings = resumed.chunks[0].ddp_config
        assert (settings.overlap_grad_reduce, settings.overlap_param_gather) == (True, True)
        resumed.step(batches, 0.1)


def kinds(strategy: Any) -> list[dict[str, tuple[Any, ...]]]:
    """Device, dtype and shape of every state."""
    return [
        {name: (it.device, it.dtype, it.shape) for name, it in state.items() if isinstance(it, Tensor)}
        for optimizer in strategy.optimizer.chained_optimizers
        for state in optimizer.optimizer.state.values()
    ]
