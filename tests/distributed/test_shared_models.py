"""Engine torch shares a model out in many ways: each has one process's losses, and loads the others' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.ranks import asked_for, losses, make_run, metrics, run_several

pytestmark = pytest.mark.distributed

ITERATIONS, HALF = 12, 6
TOLERANCE = 1e-5
"""Absolute, over 12 steps in fp32: sums come in another order, nothing else differs."""
STRATEGY, SHARDS = "parallel.strategy", "parallel.data_parallel_shard_size"
TP, PP, VPP = (f"parallel.{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline"))
MAPPING = "parallel.use_tp_pp_dp_mapping"
SCHEDULE = "parallel.pipeline_schedule"
FSDP = {STRATEGY: "fsdp"}
BASE = {
    "model.num_layers": 4, "model.kv_channels": 12, "batch.micro_batch_size": 1, "batch.global_batch_size": 4,
    "train.train_iters": ITERATIONS, "train.eval_interval": HALF, "train.eval_iters": 1,
}  # fmt: skip
# DTensor takes a millisecond an operation, whatever its size: fewer passes.
TENSOR = {TP: 2, "batch.micro_batch_size": 2}

TWO: dict[str, dict[str, Any]] = {
    "ddp": {},
    **{f"zero{stage}": {STRATEGY: "zero", "parallel.zero_stage": stage} for stage in range(4)},
    "fsdp": FSDP,
    "fsdp-once": {**FSDP, "parallel.reduce_gradients_once": True},
    "tp2": TENSOR,
    "pp2": {PP: 2},
    "pp2-gpipe": {PP: 2, SCHEDULE: "gpipe"},
    "pp2-interleaved": {PP: 2, VPP: 2, SCHEDULE: "interleaved"},
    "fsdp-recomputed": {**FSDP, "model.checkpoint_activations": True},
    "pp2-recomputed": {PP: 2, "model.checkpoint_activations": True},
}
FOUR: dict[str, dict[str, Any]] = {
    "hybrid": {**FSDP, SHARDS: 2},
    "tp2-dp2": TENSOR,
    "tp2-fsdp2": {**FSDP, **TENSOR},
    "pp2-dp2": {PP: 2},
    "pp2-fsdp2": {**FSDP, PP: 2},
    "pp2-tp2": {PP: 2, TP: 2},
    "pp2-dp2-neighbours": {PP: 2, MAPPING: True},
    "pp2-fsdp2-neighbours": {**FSDP, PP: 2, MAPPING: True},
}
LLAMA = {
    "model.kv_channels": None, "model.num_query_groups": 2, "model.ffn_hidden_size": 96, "model.swiglu": True,
    "model.normalization": "RMSNorm", "model.position_embedding_type": "rope", "model.use_rope_scaling": True,
    "model.add_bias_linear": False,
}  # fmt: skip
QWEN3 = {
    **LLAMA, "model.kv_channels": 12, "model.qk_layernorm": True, "model.untie_embeddings_and_output_weights": True,
}  # fmt: skip
# A norm of small outputs grows what the layouts round differently.
OLMO2 = {
    **LLAMA, "model.qk_layernorm": True, "model.qk_layernorm_all_heads": True, "model.use_post_norm": True,
    "model.init_method_std": 0.2,
}  # fmt: skip
GRANITE = {
    **LLAMA, "model.add_attention_bias": True, "model.embedding_multiplier": 3.0, "model.residual_multiplier": 0.5,
    "model.attention_multiplier": 0.2, "model.logits_scaling": 0.5, "model.no_rope_freq": 2,
}  # fmt: skip
KINDS = {"llama": LLAMA, "qwen3": QWEN3, "olmo2": OLMO2, "granite": GRANITE}
OF_KINDS = {
    ranks: {f"{kind}-{name}": {**own, **it} for kind, own in KINDS.items() for name, it in layouts.items()}
    for ranks, layouts in ((1, {"alone": {}}), (2, TWO), (4, FOUR))
}
SOME_OF_KINDS = ("olmo2-tp2", "qwen3-zero3", "llama-pp2-interleaved")
SHORT: dict[str, dict[str, Any]] = {
    f"{name}-{precision}": {**TWO[name], "precision": precision, "train.train_iters": 8, "fp16.initial_scale_power": 10}
    for name in ("ddp", "fsdp", "tp2", "pp2")
    for precision in ("bf16", "fp16")
}
OVERFLOW = {"precision": "fp16", "train.train_iters": 24, "fp16.initial_scale_power": 30}
OVERFLOWS = {f"{name}-overflow": {**TWO[name], **OVERFLOW} for name in ("fsdp", "tp2", "pp2")}
SAVED: dict[str, dict[str, Any]] = {
    f"saved-{name}": {**TWO[name], "train.save": True, "train.save_interval": HALF} for name in ("fsdp", "pp2")
}
# Each way to shard, format and schedule at least once; the rest in `make test-full`.
SOME_TWO = ("ddp", "zero3", "fsdp-recomputed", "tp2", "pp2-interleaved")
SOME_FOUR = ("hybrid", "pp2-tp2")
SOME_SHORT = ("ddp-bf16", "ddp-fp16", "fsdp-bf16")
SOME_OVERFLOWS = ("tp2-overflow",)
SOME_SAVED = ("saved-fsdp",)


def trained(workspace: Path, world_size: int, runs: dict[str, dict[str, Any]]) -> dict[str, Path]:
    folders = {name: make_run(workspace, name, world_size, **{**BASE, **fields}) for name, fields in runs.items()}
    run_several(list(folders.values()), world_size)
    return folders


@pytest.fixture(scope="module")
def alone(workspace: Path) -> Path:
    return trained(workspace, 1, {"alone": {}})["alone"]


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, workspace: Path) -> dict[str, Path]:
    def asked(cases: dict[str, dict[str, Any]], some: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        return asked_for(request, cases, some)

    two = {
        **asked(TWO, SOME_TWO),
        **asked(SHORT, SOME_SHORT),
        **asked(OVERFLOWS, SOME_OVERFLOWS),
        **asked(SAVED, SOME_SAVED),
    }
    return {**trained(workspace, 2, two), **trained(workspace, 4, asked(FOUR, SOME_FOUR))}


@pytest.mark.parametrize("name", [*thinned(TWO, SOME_TWO), *thinned(FOUR, SOME_FOUR)])
def test_the_losses_of_a_single_process(alone: Path, shared: dict[str, Path], name: str) -> None:
    assert losses(shared[name]) == pytest.approx(losses(alone), abs=TOLERANCE, rel=0)
    norms, theirs = (
        [entry["grad_norm"] for (_, split), entry in metrics(folder).items() if split == "train"]
        for folder in (shared[name], alone)
    )
    assert norms == pytest.approx(theirs, rel=1e-4)


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest, workspace: Path) -> dict[str, Path]:
    """Llamas and Qwens of every layout."""
    found = trained(workspace, 1, OF_KINDS[1])
    for ranks in (2, 4):
        if asked := asked_for(request, OF_KINDS[ranks], SOME_OF_KINDS):
            found |= trained(workspace, ranks, asked)
    return found


@pytest.mark.parametrize("name", thinned({**OF_KINDS[2], **OF_KINDS[4]}, SOME_OF_KINDS))
def test_a_llama_has_the_losses_of_a_single_process(kinds: dict[str, Path], name: str) -> None:
    wanted = losses(kinds[f"{name.partition('-')[0]}-alone"])
    assert wanted[(ITERATIONS, "train")] < wanted[(1, "train")] - 0.3
    assert losses(kinds[name]) == pytest.approx(wanted, abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("name", thinned(SHORT, SOME_SHORT))
def test_short_formats_follow_fp32(shared: dict[str, Path], name: str) -> None:
    # The schedule is another, for 8 iterations: DDP's fp32 weights under autocast are the measure.
    strategy, _, precision = name.rpartition("-")
    assert losses(shared[name]) == pytest.approx(losses(shared[f"ddp-{precision}"]), abs=2e-2, rel=0), strategy


@pytest.mark.parametrize("name", thinned(OVERFLOWS, SOME_OVERFLOWS))
def test_an_overflow_skips_the_step_on_all_ranks(shared: dict[str, Path], name: str) -> None:
    records = [entry for (_, split), entry in metrics(shared[name]).items() if split == "train"]
    assert [record["grad_norm"] for record in records[:3]] == [None] * 3
    assert [record["loss_scale"] for record in records[:3]] == [2.0**30, 2.0**29, 2.0**28]
    assert records[-1]["grad_norm"] is not None  # and then it trains


@pytest.mark.parametrize("source", thinned(SAVED, SOME_SAVED))
def test_a_checkpoint_loads_on_any_layout(
    request: pytest.FixtureRequest, workspace: Path, alone: Path, shared: dict[str, Path], source: str
) -> None:
    """Half of the run on one layout, the other half on another."""
    load = {"train.load": f"runs/{shared[source].name}/checkpoints/iter_{HALF:07d}"}
    two = asked_for(request, {name: TWO[name] for name in ("fsdp", "tp2", "pp2", "pp2-interleaved")}, SOME_TWO)
    layouts = {
        1: {f"{source}-one": {**FSDP, **load}},
        2: {f"{source}-{name}": {**fields, **load} for name, fields in two.items()},
    }
    for world_size, runs in layouts.items():
        for folder in trained(workspace, world_size, runs).values():
            rest = {place: loss for place, loss in losses(alone).items() if place[0] > HALF}
            assert losses(folder) == pytest.approx(rest, abs=TOLERANCE, rel=0), folder.name
