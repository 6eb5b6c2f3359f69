"""Engine megatron-core with transformer-engine's layers and Adam, on a pretended GPU and without its kernels.

transformer-engine's own Python code runs: it chooses attention, cuts weights, and keeps the states of Adam.
"""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.rehearsal.pretended_te import VERSION, Kernels, UserBuffer, import_transformer_engine
from tests.unit.train import pretended_gpu
from tests.unit.train.experiments import experiment
from tests.unit.train.pretended_gpu import GPU, REASON, LiveBytes, Transfers
from tridock.engines import cost_model_of
from tridock.errors import RequestError
from tridock.layout.activations import kept_layer

pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.filterwarnings("ignore"),  # megatron-core's, of what is missing
]
ROOT = Path(__file__).parents[2]
ALIGNED = {"model.hidden_size": 64, "model.seq_length": 64, "model.num_attention_heads": 4}
SEQUENCE = {
    "parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True,
    "parallel.pipeline_model_parallel_size": 2, "parallel.use_distributed_optimizer": True,
}  # fmt: skip
OVERLAPPED = ALIGNED | {
    "parallel.tensor_model_parallel_size": 4, "parallel.sequence_parallel": True,
    "parallel.context_parallel_size": 2,
}  # fmt: skip
MIXTURE = {
    "model.num_moe_experts": 4,
    "model.add_bias_linear": False,
    "model.normalization": "RMSNorm",
    "model.swiglu": True,
    "model.position_embedding_type": "rope",
    "model.untie_embeddings_and_output_weights": True,
    "parallel.expert_model_parallel_size": 2,
}


@pytest.fixture(scope="module")
def on_gpu() -> Callable[..., Any]:
    """Two strategies and the batches of a step, of a case by its name; transformer-engine is installed."""
    folder = ROOT / ".cache" / f"transformer-engine-{VERSION}"
    if not folder.exists():
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target"]
        subprocess.run([*argv, folder, "-r", ROOT / "tests/rehearsal/transformer-engine.txt"], check=True)
    import_transformer_engine(folder)
    from tests.unit.train import test_megatron_core_on_a_gpu as layouts

    layouts.CASES |= {
        "mixture": (MIXTURE, 2, 1),
        "fp8": ({"model.fp8": "hybrid"} | ALIGNED, 2, 1),
        "aligned": (ALIGNED, 2, 1),
        "fp8 on every axis": ({"model.fp8": "e4m3"} | ALIGNED | SEQUENCE | layouts.FULL, 8, 3),
        "local": ({"model.transformer_impl": "local"}, 1, 0),
        "chosen": ({"model.transformer_impl": "transformer_engine"}, 1, 0),
        "chosen, fp32": ({"model.transformer_impl": "transformer_engine", "precision": "fp32"}, 1, 0),
        "overlapped": (OVERLAPPED, 8, 6),
        "overlapped, recomputed": (OVERLAPPED | layouts.FULL, 8, 1),
        "overlapped, fp8": (OVERLAPPED | {"model.fp8": "hybrid"}, 8, 3),
        "overlapped, rank 0": (OVERLAPPED, 8, 0),
        "overlapped, asked": (OVERLAPPED | {"parallel.tp_comm_overlap": True}, 8, 0),
        "overlapped, off": (OVERLAPPED | {"parallel.tp_comm_overlap": False}, 8, 0),
        "overlapped, by IPC": (OVERLAPPED | {"parallel.tp_comm_overlap": True, "env": {"UB_SKIPMC": "1"}}, 8, 0),
        "normed heads": ({"model.qk_layernorm": True, "model.normalization": "RMSNorm"}, 1, 0),
    }
    return layouts.on_gpu


LAYOUTS = [
    "alone", "fp16", "distributed optimizer", "tensor and sequence", "last stage", "context", "recomputed", "Llama",
    "normed heads",
]  # fmt: skip


def modules(strategy: Any) -> set[str]:
    """The names of its modules' classes."""
    return {type(it).__name__ for chunk in strategy.chunks for it in chunk.modules()}


@pytest.mark.parametrize("name", [*LAYOUTS, "chosen", "fp8", "fp8 on every axis"])
def test_a_step_reads_the_norm_of_the_gradient_and_nothing_else(on_gpu: Callable[..., Any], name: str) -> None:
    with on_gpu(name) as (strategy, _, batches):
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= modules(strategy)
        strategy.step(batches, 0.1)
        with Transfers(on_host=1) as transfers:
            step = strategy.step(batches, 0.1)
        assert step.loss.device == GPU
        assert {it.device for chunk in strategy.chunks for it in chunk.parameters()} == {GPU}
        assert transfers.all() == {"read": 2 if name == "fp16" else 1}


@pytest.mark.parametrize(("name", "capability"), [("fp32", (9, 0)), ("fp16", (7, 0)), ("local", (9, 0))])
def test_where_it_has_no_fused_attention_or_the_experiment_says_so_it_is_not_used(
    on_gpu: Callable[..., Any], name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep every score, which the plan does not count."""
    monkeypatch.setattr(pretended_gpu, "CAPABILITY", capability)
    with on_gpu(name) as (strategy, _, batches):
        assert "FusedAttention" in modules(strategy)
        assert not any(it.startswith("TE") for it in modules(strategy))
        strategy.step(batches, 0.1)


def test_it_is_refused_where_it_has_no_fused_attention(on_gpu: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match="lacks its fused attention"), on_gpu("chosen, fp32"):
        pass


@pytest.fixture
def user_buffers(monkeypatch: pytest.MonkeyPatch) -> list[UserBuffer]:
    """Those that are made in a test, on GPUs with multicast; groups of NCCL are of the pretended kind."""

    monkeypatch.setattr(Kernels, "has_multicast", True)
    monkeypatch.setattr(UserBuffer, "made", [])
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "nccl")
    for name in ("new_group", "new_subgroups_by_enumeration"):
        monkeypatch.setattr(dist, name, pretended_for(getattr(dist, name)))
    return UserBuffer.made


def pretended_for(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any, backend: str | None = None, **named: Any) -> Any:
        return make(*given, backend="fake" if backend == "nccl" else backend, **named)

    return made


@pytest.mark.parametrize("name", ["overlapped", "overlapped, recomputed", "overlapped, fp8"])
def test_tensor_parallel_ranks_exchange_parts_of_a_matrix_beside_products(
    on_gpu: Callable[..., Any], name: str, user_buffers: list[UserBuffer], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels: Any = sys.modules["transformer_engine_torch"]
    rank = {"overlapped": 6, "overlapped, recomputed": 1, "overlapped, fp8": 3}[name]
    first = rank // 4 * 4
    with on_gpu(name) as (strategy, _, batches):
        del user_buffers[:-12]  # of the model that is built last
        # 2 samples of 64 tokens, over 2 context parallel ranks
        assert {it.shape for it in user_buffers} == {(64, 64)}
        assert {it.ranks for it in user_buffers} == {4}
        kinds = Counter(it.dtype for it in user_buffers)
        assert kinds == ({torch.uint8: 8, torch.bfloat16: 4} if "fp8" in name else {torch.bfloat16: 12})
        helper = user_buffers[0].helper
        assert dist.get_process_group_ranks(helper.world) == list(range(8))
        assert dist.get_process_group_ranks(helper.domain) == list(range(first, first + 4))
        columns, rows = (
            {it.ub_name: it for it in strategy.chunks[0].modules() if type(it).__name__ == kind}
            for kind in ("TELayerNormColumnParallelLinear", "TERowParallelLinear")
        )
        assert (columns.keys(), rows.keys()) == ({"qkv", "fc1"}, {"proj", "fc2"})
        for layer in columns.values():
            assert (layer.ub_overlap_ag_fprop, layer.ub_bulk_dgrad, layer.ub_bulk_wgrad) == (True, True, True)
            assert not layer.ub_overlap_rs_dgrad
        for layer in rows.values():
            assert (layer.ub_overlap_rs_fprop, layer.ub_overlap_ag_dgrad) == (True, True)
        strategy.step(batches, 0.1)
        with (
            mock.patch.object(Kernels, "generic_gemm", wraps=Kernels.generic_gemm) as products,
            Transfers(on_host=1) as transfers,
        ):
            assert kernels.generic_gemm is products
            strategy.step(batches, 0.1)
        kind = kernels.CommOverlapType
        beside = Counter(call.kwargs["comm_type"] for call in products.call_args_list if call.kwargs["comm_overlap"])
        layers, passes = strategy.experiment.model.num_layers, len(batches)
        # A layer gathers for qkv and fc1, and their inputs again and the gradients of proj's and fc2's outputs in the
        # backward pass; it scatters what proj and fc2 put out, and the gradients of qkv's and fc1's inputs.
        again = 2 if "recomputed" in name else 0
        assert beside == {kind.AG: 6 * layers * passes, kind.RS: (4 + again) * layers * passes}
        assert transfers.all() == {"read": 1}
    assert capsys.readouterr().out.count("note: tp_comm_overlap is on") == (2 if rank == 0 else 0)


def test_the_overlap_is_off_without_multicast_or_if_the_experiment_says_so(
    on_gpu: Callable[..., Any],
    user_buffers: list[UserBuffer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with on_gpu("overlapped, off"):
        assert not user_buffers
    with on_gpu("overlapped, asked"):
        assert user_buffers
    assert "note: tp_comm_overlap is on; parallel.tp_comm_overlap: false turns it off" in capsys.readouterr().out
    user_buffers.clear()
    monkeypatch.setattr(Kernels, "has_multicast", False)
    with monkeypatch.context() as launched:
        launched.setenv("UB_SKIPMC", "1")  # the experiment's env
        with on_gpu("overlapped, by IPC"):
            assert user_buffers
    user_buffers.clear()
    what = "parallel.tp_comm_overlap: rank 0 lacks CUDA multicast; got true; leave it out, or set it to false"
    with pytest.raises(RequestError, match=what), on_gpu("overlapped, asked"):
        pass
    with on_gpu("overlapped") as (strategy, _, batches):
        assert not user_buffers
        strategy.step(batches, 0.1)
    monkeypatch.setattr(Kernels, "has_multicast", True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of 4 tensor parallel ranks
    with on_gpu("overlapped"):
        assert not user_buffers


def test_a_run_that_does_not_ask_for_the_overlap_goes_on_where_its_buffers_cannot_start(
    on_gpu: Callable[..., Any], user_buffers: list[UserBuffer], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformer_engine.pytorch.module import base

    error = RuntimeError("CUDA Error: operation not permitted")
    broken = mock.patch.object(base, "initialize_ub", autospec=True, side_effect=error)
    with broken, on_gpu("overlapped, rank 0") as (strategy, _, batches):
        strategy.step(batches, 0.1)
    assert not user_buffers
    what = "note: tp_comm_overlap is off: rank 0 cannot start user buffers (CUDA Error: operation not permitted)\n"
    assert what in capsys.readouterr().out
    with broken, pytest.raises(RuntimeError, match="not permitted"), on_gpu("overlapped, asked"):
        pass


def test_matrices_of_fp8_are_quantized_once_a_step(on_gpu: Callable[..., Any]) -> None:
    """Also after the first step, whose weights are others; inputs and gradients are at each micro-batch."""
    kernels: Any = sys.modules["transformer_engine_torch"]
    with on_gpu("fp8") as (strategy, _, batches):
        shapes = [tuple(it.shape) for name, it in strategy.chunks[0].named_parameters() if ".linear_" in name]
        matrices = Counter(shape for shape in shapes if len(shape) == 2)
        for _ in range(2):
            with mock.patch.object(Kernels, "quantize", wraps=Kernels.quantize) as quantize:
                assert kernels.quantize is quantize
                strategy.step(batches, 0.1)
            quantized = Counter(tuple(call.args[0].shape) for call in quantize.call_args_list)
            assert len(batches) == 2
            assert {shape: quantized[shape] for shape in matrices} == matrices
            assert sum(quantized.values()) > 3 * len(batches) * sum(matrices.values()) / 2


@pytest.mark.parametrize("name", ["alone", "tensor and sequence", "fp8"])
def test_products_accumulate_their_gradients_where_apex_is_installed(on_gpu: Callable[..., Any], name: str) -> None:
    from megatron.core.tensor_parallel import layers

    kernel = types.SimpleNamespace(wgrad_gemm_accum_fp32=lambda inputs, gradients, total: total.add_(0))
    installed = mock.patch.multiple(
        layers, create=True, _grad_accum_fusion_available=True, fused_weight_gradient_mlp_cuda=kernel
    )
    with installed, on_gpu(name) as (strategy, _, batches), Transfers(on_host=1):
        strategy.step(batches, 0.1)
        (chunk,) = strategy.chunks
        added = {name: it.grad_added_to_main_grad for name, it in chunk.named_parameters()}
        matrices = {name for name in added if re.search(r"(qkv|proj|fc1|fc2)\.weight$", name)}
        assert len(matrices) == 4 * strategy.experiment.model.num_layers
        assert {name for name, one in added.items() if one} == {
            *matrices,
            "module.module.embedding.word_embeddings.weight",
        }


@pytest.mark.parametrize("name", [*LAYOUTS, "fp8", "mixture"])
def test_a_checkpoint_has_the_names_and_shapes_of_one_without_it(on_gpu: Callable[..., Any], name: str) -> None:
    """So it continues on an image without transformer-engine, and the other way round."""
    from tridock.train.megatron_core import model

    names: list[set[str]] = []

    def weights(name: str) -> dict[str, Any]:
        with on_gpu(name) as (strategy, _, _batches):
            found = (it for _, part in strategy._named() for _, it in model.sharded_weights(part))
            names.append({key for name, _ in strategy._named() for key in strategy._state(is_loading=True)[name]})
            return {f"{it.key} {it.global_offset}": (it.global_shape, it.local_shape, it.dtype) for it in found}

    with_it = weights(name)
    with mock.patch.object(model, "has_transformer_engine", return_value=False):
        assert with_it == weights("aligned" if name == "fp8" else name)
    assert len(with_it) > 10
    assert not any(name.endswith("_extra_state") for name in names[0] | names[1])


@pytest.mark.parametrize("name", ["alone", "fp16", "distributed optimizer", "fp8", "mixture"])
def test_its_adam_resumes(on_gpu: Callable[..., Any], name: str) -> None:
    from tests.unit.train.test_megatron_core_on_a_gpu import kinds
    from tridock.train.megatron_core import checkpoint

    with on_gpu(name) as (strategy, resumed, batches):
        strategy.step(batches, 0.1)
        saved = strategy._state(is_loading=False)
        with mock.patch.object(checkpoint, "load", lambda state, _: read_back(saved, state)):
            resumed.load(Path(), 1)
        assert kinds(resumed) == kinds(strategy)
        assert kinds(resumed)
        resumed.step(batches, 0.1)
        counts = [group["step"] for it in resumed.optimizer.chained_optimizers for group in it.optimizer.param_groups]
        assert set(counts) == {2}


WIDE = {
    "precision": "bf16", "model.hidden_size": 256, "model.num_attention_heads": 8, "model.seq_length": 128,
    "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0,
}  # fmt: skip
GROUPED, ROPE = {"model.num_query_groups": 2}, {"model.position_embedding_type": "rope"}
NORMED, TENSOR = {"model.qk_layernorm": True}, {"parallel.tensor_model_parallel_size": 2}
SWIGLU = {"model.swiglu": True, "model.normalization": "RMSNorm", "model.add_bias_linear": False}
EXPERTS = SWIGLU | ROPE | GROUPED | {"model.num_moe_experts": 4}
KEPT: dict[str, tuple[dict[str, Any], int]] = {
    "GPT-2": ({}, 1),
    "fp16": ({"precision": "fp16", "model.transformer_impl": "transformer_engine"}, 1),
    "fp8": ({"model.fp8": "hybrid"}, 1),
    "fp8, Llama": ({"model.fp8": "e4m3"} | ROPE | GROUPED | SWIGLU, 1),
    "fp8, tensor and sequence": ({"model.fp8": "hybrid"} | TENSOR | {"parallel.sequence_parallel": True}, 2),
    "dropout": ({"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}, 1),
    "grouped": (GROUPED, 1),
    "rotated": (ROPE, 1),
    "Llama": (ROPE | GROUPED | SWIGLU, 1),
    "normed": (NORMED, 1),
    "Qwen 3": (NORMED | ROPE | GROUPED | SWIGLU, 1),
    "tensor": (TENSOR, 2),
    "tensor and sequence": (TENSOR | {"parallel.sequence_parallel": True} | ROPE | GROUPED | SWIGLU, 2),
    "fewer groups than ranks": (ROPE | GROUPED | {"parallel.tensor_model_parallel_size": 4}, 4),
    "mixture": (EXPERTS, 1),
    "mixture on two ranks": (EXPERTS | {"parallel.expert_model_parallel_size": 2}, 2),
    "shared expert, sequence": (
        EXPERTS | TENSOR | {"parallel.sequence_parallel": True, "model.moe_shared_expert_intermediate_size": 512},
        2,
    ),
    "context": ({"parallel.context_parallel_size": 2}, 2),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_as_many_bytes_as_the_plan_says(on_gpu: Callable[..., Any], name: str) -> None:
    fields, world_size = KEPT[name]
    two, four = (
        bytes_of_a_forward_pass(on_gpu, WIDE | fields | {"model.num_layers": layers}, world_size) for layers in (2, 4)
    )
    made = experiment(engine="megatron-core", **{"parallel.strategy": "ddp"} | WIDE | fields)
    planned = kept_layer(made, cost_model_of(made).sizes(made, "cuda"))
    assert (four - two) / 2 == pytest.approx(planned, rel=0.002)


def bytes_of_a_forward_pass(on_gpu: Callable[..., Any], fields: dict[str, Any], world_size: int) -> int:
    """What it makes on the pretended GPU that is there at its end."""
    from tests.unit.train import test_megatron_core_on_a_gpu as layouts

    layouts.CASES["counted"] = (fields, world_size, 0)
    with on_gpu("counted") as (strategy, *_):
        batch = torch.zeros(2, WIDE["model.seq_length"] + 1, dtype=torch.int64, device=GPU)
        strategy._forward(iter([batch]), strategy.chunks[0])  # its workspace for matrix products is there now
        with LiveBytes() as live:
            losses, _ = strategy._forward(iter([batch]), strategy.chunks[0])
        assert losses.requires_grad
        return live.live["cuda"]


def read_back(saved: Any, state: Any) -> Any:
    """As dist_checkpointing.load: what is not sharded comes from the file, what is, into the tensors that there are."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, merge
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, apply_factory_merges
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    _, common = extract_matching_values(saved, lambda it: isinstance(it, (ShardedBase, LocalNonpersistentObject)))
    sharded, own, factories = load_preprocess(state)
    sharded, _ = extract_matching_values(sharded, lambda it: isinstance(it, ShardedBase))
    merge(common, own)
    merge(common, dict_list_map_inplace(lambda it: it.data, sharded))
    return apply_factory_merges(common, factories)
