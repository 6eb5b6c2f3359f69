"""DeepSpeed's JSON configuration for strategy ``zero`` of engine ``torch``. Pure."""

from __future__ import annotations

from typing import Any

from tridock.experiment.schema import Experiment


def deepspeed_config(experiment: Experiment, data_parallel_size: int) -> dict[str, Any]:
    """What ``ds_config.json`` of a run holds. The optimizer and the learning rate are the training loop's own.

    A ``global_batch_size`` that is given must be a multiple of ``micro_batch_size * data_parallel_size``: the plan
    checks it.
    """
    batch, fp16 = experiment.batch, experiment.fp16
    samples = batch.samples_per_step(data_parallel_size)
    config: dict[str, Any] = {
        "train_batch_size": samples,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": samples // (batch.micro_batch_size * data_parallel_size),
        "gradient_clipping": experiment.optimizer.clip_grad,
        "zero_optimization": {"stage": experiment.parallel.zero_stage},
    }
    if experiment.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if experiment.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": fp16.loss_scale,
            "initial_scale_power": fp16.initial_scale_power,
            "loss_scale_window": fp16.loss_scale_window,
            "hysteresis": fp16.hysteresis,
            "min_loss_scale": 1,
        }
    return config
