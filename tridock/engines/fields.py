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

HONOURED: Final = Honoured()
NO_TOKENIZER: Final = Unused("the data are tokens already: no tokenizer is read")
COMMON: Final[Fields] = dict.fromkeys(
    (
        *("name", "engine", "model", "parallel", "batch", "data", "optimizer", "precision", "fp16", "train"),
        *("launch", "restart", "trackers", "notify", "env"),
    ),
    HONOURED,
)
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
