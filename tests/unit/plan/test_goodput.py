"""Goodput: Daly's estimate against a simulation of failures; the best interval; what a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.experiments import with_fields
from tridock.plan import Assumptions, assess
from tridock.plan.goodput import best_interval, goodput

BASE: dict[str, Any] = {
    "name": "small",
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 1024},
    "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    "data": {"data_path": "data/x"},
    "train": {"train_iters": 3},
}


def simulated(interval: float, pause: float, lost: float, mtbf: float) -> float:
    """The same share, of intervals that restart until one has no failure."""
    chance, count = random.Random(1), 4000
    now = 0.0
    fails = chance.expovariate(1 / mtbf)
    for _ in range(count):
        while now + interval + pause > fails:
            now, fails = fails, fails + chance.expovariate(1 / mtbf)
            while now + lost > fails:
                now, fails = fails, fails + chance.expovariate(1 / mtbf)
            now += lost
        now += interval + pause
    return count * interval / now


@pytest.mark.parametrize(
    "case", [(600, 20, 51, 11000), (3000, 300, 200, 11000), (600, 60, 600, 2000), (100, 1, 10, 1e6)]
)
def test_a_simulation(case: tuple[float, float, float, float]) -> None:
    assert goodput(*case) == pytest.approx(simulated(*case), abs=0.02)


@pytest.mark.parametrize("pause", [1.0, 30.0, 600.0])
@pytest.mark.parametrize("mtbf", [3600.0, 86400.0])
def test_no_other_interval_is_better(pause: float, mtbf: float) -> None:
    best = best_interval(pause, mtbf)
    found = goodput(best, pause, 60.0, mtbf)
    assert all(goodput(best * factor, pause, 60.0, mtbf) < found + 1e-3 for factor in (0.2, 0.5, 0.8, 1.3, 2.0, 5.0))
    assert goodput(best / 3, pause, 60.0, mtbf) < found > goodput(best * 3, pause, 60.0, mtbf)


def test_a_cluster_that_never_runs_an_interval() -> None:
    assert goodput(1e6, 1.0, 1.0, 10.0) == 0.0
    assert goodput(1.0, 1.0, 1e6, 10.0) == 0.0


@pytest.mark.parametrize(
    ("fields", "per_parameter"),
    [
        ({"parallel.strategy": "ddp"}, 12),
        ({"parallel.strategy": "fsdp"}, 12),
        ({"parallel.strategy": "fsdp", "parallel.data_parallel_shard_size": 2}, 12),
        ({"parallel.strategy": "zero", "parallel.zero_stage": 1, "precision": "bf16"}, 14),
        ({"parallel.strategy": "zero", "parallel.zero_stage": 3, "precision": "bf16"}, 14),
        ({"engine": "megatron-core", "precision": "bf16"}, 14),
        ({"engine": "megatron-core", "precision": "bf16", "parallel.use_distributed_optimizer": True}, 14),
        ({"engine": "megatron-core", "precision": "bf16", "parallel.tensor_model_parallel_size": 2}, 14),
    ],
)
def test_a_checkpoint_has_each_state_once(fields: dict[str, Any], per_parameter: float) -> None:
    found = assess(with_fields(BASE, fields), {"a": range(4)}, "e", Assumptions())
    assert found.cost is not None
    assert found.checkpoint_bytes == pytest.approx(per_parameter * found.cost.parameters, rel=0.02)
