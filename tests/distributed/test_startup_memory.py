"""What a rank holds before its first step: what the plan says, and never the whole of a model that is sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import Started, make_run
from tridock.contracts.run_folder import DEEPSPEED_CONFIG, EXPERIMENT
from tridock.engines import cost_model_of
from tridock.experiment import load_experiment
from tridock.layout.shape import LayoutShape
from tridock.plan.memory import memory_of_stage

pytestmark = pytest.mark.distributed

MODEL = {"model.num_layers": 8, "model.hidden_size": 128, "model.num_attention_heads": 4, "model.vocab_size": 256}
DRAWN = 4 * (4 * 128 * 128 + 4 * 128)
"""Bytes of the largest module, which is drawn whole on the host."""
STRATEGY, TP, PP = "parallel.strategy", "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
SHARDED: dict[str, dict[str, Any]] = {
    "fsdp": {STRATEGY: "fsdp"},
    "tp4": {TP: 4},
    "pp4": {PP: 4},
    "zero3": {STRATEGY: "zero", "parallel.zero_stage": 3},
}
WHOLE: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {STRATEGY: "zero", "parallel.zero_stage": 1, "precision": "bf16"},
}
CORE: dict[str, dict[str, Any]] = {
    "one": {"precision": "bf16"},
    "distributed": {"parallel.use_distributed_optimizer": True, "precision": "bf16"},
    "tp2": {TP: 2},
    "pp2": {PP: 2, "parallel.virtual_pipeline_model_parallel_size": 2, "parallel.use_distributed_optimizer": True},
}
BUCKET = 1000
"""Elements, instead of DeepSpeed's 5e8, which would hide the rest."""


def peaks(workspace: Path, engine: str, world_size: int, cases: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """The most bytes that each rank of each case holds while it is built."""
    folders = [make_run(workspace, name, world_size, **{"engine": engine, **MODEL, **it}) for name, it in cases.items()]
    for config in (folder / DEEPSPEED_CONFIG for folder in folders):
        if config.exists():
            document = json.loads(config.read_text())
            document["zero_optimization"]["reduce_bucket_size"] = BUCKET
            config.write_text(json.dumps(document))
    imports = "megatron-core" if engine == "megatron-core" else "deepspeed"
    argv = ["-m", "tests.distributed.startup", *map(str, folders)]
    with Started(argv, folders[0], world_size, {}, imports) as started:
        finished = started.wait()
    assert finished.codes == [0] * world_size, "\n".join(finished.err)
    found = [json.loads(out.splitlines()[-1]) for out in finished.out]
    return {name: [rank[name] for rank in found] for name in cases}


def planned(folder: Path, rank: int, world_size: int) -> int:
    """The start-up bytes of a CPU rank, without DeepSpeed's bucket."""
    experiment = load_experiment(folder / EXPERIMENT)
    parallel = experiment.parallel
    stages = parallel.pipeline_model_parallel_size
    data = world_size // (stages * parallel.tensor_model_parallel_size)
    stage, shape = rank * stages // world_size, LayoutShape(data, 1, world_size)
    states = cost_model_of(experiment).states(
        experiment, cost_model_of(experiment).parameters(experiment, stage), shape, "cpu"
    )
    started = memory_of_stage(experiment, stage, shape, None).startup_bytes
    return started - (states.bucket if parallel.zero_stage == 3 else 0)


@pytest.fixture(scope="module")
def torch_peaks(workspace: Path) -> dict[str, list[int]]:
    return peaks(workspace, "torch", 4, {**SHARDED, **WHOLE})


@pytest.mark.parametrize("name", SHARDED)
def test_no_rank_holds_a_sharded_model_whole(workspace: Path, torch_peaks: dict[str, list[int]], name: str) -> None:
    experiment = load_experiment(workspace / "runs" / name / EXPERIMENT)
    whole = experiment.model_copy(update={"parallel": type(experiment.parallel)(strategy="ddp")})
    assert max(torch_peaks[name]) < 4 * cost_model_of(whole).parameters(whole, 0).total


@pytest.mark.parametrize("name", [*SHARDED, *WHOLE])
def test_engine_torch_starts_as_planned(workspace: Path, torch_peaks: dict[str, list[int]], name: str) -> None:
    for rank, peak in enumerate(torch_peaks[name]):
        start = planned(workspace / "runs" / name, rank, 4)
        # Gloo's thread may still hold the weights that DDP has broadcast, as one tensor.
        late = start / 2 if name == "ddp" else 0
        assert 0.97 * start < peak < 1.03 * start + 1.05 * DRAWN + late, (name, rank, peak, start)


def test_megatron_core_starts_as_planned(workspace: Path) -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    for name, ranks in peaks(workspace, "megatron-core", 2, {f"core-{name}": it for name, it in CORE.items()}).items():
        for rank, peak in enumerate(ranks):
            start = planned(workspace / "runs" / name, rank, 2)
            assert 0.97 * start < peak < 1.03 * start + 1.05 * DRAWN, (name, rank, peak, start)
