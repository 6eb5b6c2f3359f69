"""An engine's declaration of each field: its ranks honour it, never read it, or the plan refuses it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Honoured:
    """The field does what its description says."""


@dataclass(frozen=True, slots=True)
class Unused:
    """The field is accepted, but no rank reads it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A value other than the default is a problem: what is wrong, and what to do about it."""

    what: str = "engine {engine} has no such option"
    todo: str = "leave it out, or use engine {others}"
    """``others``: the engines that honour the field."""
    default: object = None
    """The engine's default, if it differs from the schema's."""


Declared = Honoured | Unused | Refused
Fields = Mapping[str, Declared]
"""Declarations by field path; a section's path covers its fields without a declaration."""

COMMON: Final[Fields] = dict.fromkeys(
    (
        *("name", "engine", "model", "parallel", "batch", "data", "optimizer", "precision", "fp16", "train"),
        *("launch", "restart", "trackers", "notify", "env", "deepspeed", "megatron_args"),
    ),
    Honoured(),
) | {"program": Unused("only a plan describes other programs")}
"""Fields that every engine honours unless its own table declares otherwise."""

MIXTURE: Final[tuple[str, ...]] = (
    "model.num_moe_experts",
    "model.moe_router_topk",
    "model.moe_router_pre_softmax",
    "model.moe_ffn_hidden_size",
    "model.moe_shared_expert_intermediate_size",
    "model.moe_shared_expert_gate",
    "model.moe_router_load_balancing_type",
    "model.moe_aux_loss_coeff",
    "parallel.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size",
)
"""The fields of a mixture of experts."""
CHECKPOINT_OPTIONS: Final = (
    "partition_activations",
    "checkpoint_in_cpu",
    "contiguous_checkpointing",
    "synchronize_each_layer",
)
"""DeepSpeed's options for stored activations, by the names of the fields in ``model``."""
CORE_ONLY: Final = (
    *("parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers"),
    *("parallel.context_parallel_size", "parallel.sequence_parallel", "parallel.tp_comm_overlap"),
    *("parallel.use_distributed_optimizer", "model.recompute_granularity", "model.recompute_method"),
    *("model.recompute_num_layers", "model.transformer_impl", "model.fp8"),
)
"""Fields of megatron-core alone."""
NO_TOKENIZER: Final[Fields] = dict.fromkeys(
    ("data.vocab_file", "data.merge_file"), Unused("the data are tokens already: no tokenizer is read")
)


def as_yaml(value: object) -> str:
    """Returns a field's value as YAML, a list's items separated by spaces."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "[]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_overrides(fields: Mapping[str, object]) -> list[str]:
    """Returns fields, by path, as the ``--set`` overrides that set them."""
    return [f"{path}={as_yaml(value)}" for path, value in fields.items()]
