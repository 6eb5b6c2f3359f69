"""ds_config.json, read by DeepSpeed's own code."""

from typing import Any

import pytest

from tests.unit.engines.test_deepspeed_config import experiment
from tridock.engines.deepspeed import deepspeed_config
from tridock.engines.deepspeed_options import PASSED

runtime = pytest.importorskip("deepspeed.runtime.config")


def test_deepspeed_accepts_what_reaches_it_of_a_users_json() -> None:
    sizes = {name: 5e7 for name, kind in PASSED.items() if isinstance(kind, tuple)}
    switches = dict.fromkeys((name for name, kind in PASSED.items() if kind is bool), True)
    given: dict[str, Any] = {"zero_optimization": {"stage": 2}, "communication_data_type": "fp32"}
    for path, value in {**sizes, **switches}.items():
        section, _, name = path.rpartition(".")
        (given[section] if section else given)[name] = value
    config = deepspeed_config(experiment(deepspeed=given), 1)
    assert config["zero_optimization"]["reduce_bucket_size"] == 50_000_000
    read = runtime.DeepSpeedConfig(config)
    assert read.zero_config.allgather_bucket_size == 50_000_000
    assert read.wall_clock_breakdown
    assert read.zero_config.prefetch_bucket_size == 50_000_000


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_accepts_it(precision: str, stage: int) -> None:
    config = deepspeed_config(experiment(precision=precision, parallel={"zero_stage": stage}), 1)
    read = runtime.DeepSpeedConfig(config)
    assert read.zero_optimization_stage == stage
    assert read.gradient_accumulation_steps == 12
