"""A rank is killed at random points of its saves, and the run resumes, with every engine but Megatron-LM v1.1.5.

That one's is in ``test_megatron_v115.py``. ``make test`` kills at a few points, ``make test-full`` at 200 of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.kills import survive
from tests.distributed.ranks import Started, make_run
from tests.patience import MATRIX_S

pytestmark = pytest.mark.distributed

DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("tridock.train.__main__", "torch", {"parallel.strategy": "ddp"}),
    "zero2": ("tridock.train.__main__", "deepspeed", {"parallel.strategy": "zero", "parallel.zero_stage": 2}),
    "zero3": ("tridock.train.__main__", "deepspeed", {"parallel.strategy": "zero", "parallel.zero_stage": 3}),
    "fsdp": ("tridock.train.__main__", "torch", {"parallel.strategy": "fsdp"}),
    "tensor": ("tridock.train.__main__", "torch", {"parallel.tensor_model_parallel_size": 2}),
    "pipeline": ("tridock.train.__main__", "torch", {"parallel.pipeline_model_parallel_size": 2}),
    "megatron-core": ("tridock.train.megatron_core.pretrain_gpt", "megatron-core", {
        "engine": "megatron-core", "parallel.pipeline_model_parallel_size": 2,
    }),
}  # fmt: skip


@pytest.mark.timeout(MATRIX_S)
@pytest.mark.parametrize("points", [3, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("engine", thinned(ENGINES, ("fsdp", "megatron-core")))
def test_a_kill_at_any_point_of_a_save_changes_no_loss(
    tmp_path: Path, workspace: Path, engine: str, points: int
) -> None:
    module, imports, own = ENGINES[engine]
    (tmp_path / "data").symlink_to(workspace / "data")

    def begin(name: str, fault: str | None, **fields: Any) -> tuple[Path, Started]:
        folder = make_run(tmp_path, name, 2, **{"parallel.strategy": "ddp", **own}, **DROPOUT, **fields)
        arguments = ["-m", module] if fault is None else ["-m", "tests.distributed.killed", module, fault]
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return folder, Started([*arguments, "--run-folder", str(folder)], folder, 2, env, imports)

    survive(begin, tmp_path, "checkpoints", points)
