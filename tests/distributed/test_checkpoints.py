"""Checkpoints survive: kills, preemption, damage, full disks; of the engines torch and megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.disturbed import ITERATIONS, live_through
from tests.distributed.ranks import Started, make_data, make_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
ENGINES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "ddp": ("tridock.train.__main__", "ddp.pt", 0, {"parallel.strategy": "ddp"}),
    "zero2": ("tridock.train.__main__", "*zero_pp_rank_1*", 1, {"parallel.strategy": "zero", "parallel.zero_stage": 2}),
    "megatron-core": ("tridock.train.pretrain_gpt", "__1_0.distcp", 1, {
        "engine": "megatron-core", "parallel.strategy": "ddp", "parallel.pipeline_model_parallel_size": 2,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    make_data(folder)
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_what_happens_to_a_run_does_not_change_its_losses(workspace: Path, engine: str) -> None:
    module, victim, writer, own = ENGINES[engine]

    def begin(name: str, full: str | None, **fields: Any) -> tuple[Path, Started]:
        common = {**own, **DROPOUT, "train.train_iters": ITERATIONS}
        folder = make_run(workspace, f"{engine}-{name}", 2, **common, **fields)
        words = ["-m", module] if full is None else ["-m", "tests.distributed.checkpointed", module, full]
        return folder, Started([*words, "--run-folder", str(folder)], folder, 2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})

    live_through(begin, victim, writer)
