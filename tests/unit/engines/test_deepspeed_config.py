"""ds_config.json: what each precision and stage becomes."""

from typing import Any

import pytest

from tridock.engines.deepspeed import deepspeed_config
from tridock.experiment import Experiment


def experiment(**fields: Any) -> Experiment:
    base: dict[str, Any] = {
        "name": "a",
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 16},
        "batch": {"micro_batch_size": 2, "global_batch_size": 24},
        "data": {"data_path": "data/x"},
        "train": {"train_iters": 5},
    }
    return Experiment.model_validate(base | fields)


def test_whole_for_bf16() -> None:
    given = experiment(parallel={"zero_stage": 2}, optimizer={"clip_grad": 0.5})
    assert deepspeed_config(given, data_parallel_size=4) == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 250_000_000},
        "bf16": {"enabled": True},
    }


@pytest.mark.parametrize(
    ("stage", "stages", "replicas"),
    [(0, 1, 4), (1, 2, 4), (1, 1, 1), (3, 1, 4)],
    ids=["stage 0 has no option", "DeepSpeed's pipelines cannot", "nothing is sent", "stage 3 does by itself"],
)
def test_where_gradients_do_not_overlap(stage: int, stages: int, replicas: int) -> None:
    given = experiment(parallel={"zero_stage": stage, "pipeline_model_parallel_size": stages})
    assert deepspeed_config(given, replicas)["zero_optimization"] == {"stage": stage}


def test_fp32_names_no_format() -> None:
    config = deepspeed_config(experiment(precision="fp32"), 1)
    assert "bf16" not in config
    assert "fp16" not in config


@pytest.mark.parametrize("loss_scale", [0.0, 128.0])
def test_fp16_carries_the_loss_scale(loss_scale: float) -> None:
    scale = {"loss_scale": loss_scale, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 3}
    config = deepspeed_config(experiment(precision="fp16", fp16=scale), 2)
    assert config["fp16"] == {"enabled": True, **scale, "min_loss_scale": 1}
