"""A user's own DeepSpeed JSON in an experiment: its options, and the experiment fields that they set. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

AUTO: Final = "auto"
"""Hugging Face's value for an option that the program fills in."""
FIELDS: Final[Mapping[str, str]] = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_clipping": "optimizer.clip_grad",
    "zero_optimization.stage": "parallel.zero_stage",
    "fp16.loss_scale": "fp16.loss_scale",
    "fp16.initial_scale_power": "fp16.initial_scale_power",
    "fp16.loss_scale_window": "fp16.loss_scale_window",
    "fp16.hysteresis": "fp16.hysteresis",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas.0": "optimizer.adam_beta1",
    "optimizer.params.betas.1": "optimizer.adam_beta2",
    "optimizer.params.eps": "optimizer.adam_eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.max_grad_norm": "optimizer.clip_grad",
    "activation_checkpointing.partition_activations": "model.partition_activations",
    "activation_checkpointing.cpu_checkpointing": "model.checkpoint_in_cpu",
    "activation_checkpointing.contiguous_memory_optimization": "model.contiguous_checkpointing",
    "activation_checkpointing.synchronize_checkpoint_boundary": "model.synchronize_each_layer",
}
"""DeepSpeed options by path, each with the equivalent field of an experiment."""
FORMATS: Final = {"fp16.enabled": "fp16", "bf16.enabled": "bf16"}
"""Options that choose ``precision``."""
_SECTIONS: Final = ("fp16", "bf16", "zero_optimization", "optimizer", "params", "activation_checkpointing")


def options(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each option with its dotted path, from nested sections too. Adam's ``betas`` become two options."""
    for name, value in given.items():
        if isinstance(value, Mapping) and name in _SECTIONS:
            yield from options(value, f"{prefix}{name}.")
        elif name == "betas" and isinstance(value, list) and len(value) == 2:
            yield from ((f"{prefix}betas.{place}", beta) for place, beta in enumerate(value))
        else:
            yield f"{prefix}{name}", value


def with_fields_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an experiment's fields, and adds those that only its ``deepspeed`` section sets."""
    given = fields.get("deepspeed")
    if not isinstance(given, Mapping):
        return fields
    filled = dict(fields)
    for path, value in options(given):
        if path in FORMATS and value is True:
            filled.setdefault("precision", FORMATS[path])
        section, _, name = FIELDS.get(path, "").partition(".")
        there = filled.get(section, {})
        if name and value != AUTO and isinstance(there, Mapping) and name not in there:
            filled[section] = {**there, name: value}
    return filled
