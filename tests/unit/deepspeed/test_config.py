"""ds_config.json, read by DeepSpeed's own code."""

import pytest

from tests.unit.engines.test_deepspeed_config import experiment
from tridock.engines.deepspeed import deepspeed_config

runtime = pytest.importorskip("deepspeed.runtime.config")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_accepts_it(precision: str, stage: int) -> None:
    config = deepspeed_config(experiment(precision=precision, parallel={"zero_stage": stage}), 1)
    read = runtime.DeepSpeedConfig(config)
    assert read.zero_optimization_stage == stage
    assert read.gradient_accumulation_steps == 12
