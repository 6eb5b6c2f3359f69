"""The planner's memory against what torch allocates on a GPU: within 5 %, for sizes, ZeRO stages and recomputation.

What is compared is the plan's total without context, NCCL and fragmentation, and ``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.runs import train
from tridock.data.corpus import prepare_demo
from tridock.plan.memory import OVERHEAD

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHORT = ("train.train_iters=3", "train.log_interval=1")
FULL = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")
TORCH = ("engine=torch",)
GRID = {
    "megatron-core": (),
    "megatron-core, full": FULL,
    "megatron-core, selective": ("model.recompute_granularity=selective",),
    "megatron-core, dropout": ("model.hidden_dropout=0.1",),
    "torch, ddp": (*TORCH, "parallel.strategy=ddp"),
    "torch, ddp, checkpointed": (*TORCH, "parallel.strategy=ddp", "model.checkpoint_activations=true"),
    **{
        f"torch, ZeRO {stage}": (*TORCH, "parallel.strategy=zero", f"parallel.zero_stage={stage}") for stage in range(4)
    },
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    prepare_demo(folder / "data" / "demo", report=lambda _: None)
    return folder


@pytest.mark.parametrize("size", ["125m", "345m", "1.3b"])
@pytest.mark.parametrize("kind", GRID)
def test_the_plan_says_what_is_allocated(
    workspace: Path, size: str, kind: str, record_property: Callable[[str, int], None]
) -> None:
    run = train(workspace, f"bench/gpt-{size}.yaml", *SHORT, *GRID[kind])
    stage = json.loads((run / "plan.json").read_text())["memory"]["stages"][0]
    predicted = sum(term["bytes"] for term in stage["terms"] if term["name"] not in OVERHEAD)
    end = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    record_property("planned_bytes", predicted)
    record_property("peak_bytes", end["peak_memory_bytes"])
    assert predicted == pytest.approx(end["peak_memory_bytes"], rel=0.05)
