"""What an engine declares of each field: its ranks honour it or never read it, or the plan refuses it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Honoured:
    """The field does what its description says."""


@dataclass(frozen=True, slots=True)
class Unused:
    """The field is accepted, and no rank reads it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A value other than the default is a problem: what is wrong, and what to do about it."""

    what: str = "engine {engine} has no such option"
    todo: str = "leave it out, or use engine {others}"
    """``others``: the engines that honour the field."""
    default: object = None
    """Where it is not the schema's own."""


Declared = Honoured | Unused | Refused
Fields = Mapping[str, Declared]
"""By a field's path, or by a section's for those of its fields that have no line of their own."""

HONOURED: Final = Honoured()
NO_TOKENIZER: Final = Unused("the data are tokens already: no tokenizer is read")
COMMON: Final[Fields] = dict.fromkeys(
    (
        *("name", "engine", "model", "parallel", "batch", "data", "optimizer", "precision", "fp16", "train"),
        *("launch", "restart", "trackers", "notify", "env"),
    ),
    HONOURED,
)
"""What every engine honours, but for the fields that its own table names."""


MIXTURE: Final[tuple[str, ...]] = (
    "model.num_moe_experts",
    "model.moe_router_topk",
    "model.moe_ffn_hidden_size",
    "model.moe_router_load_balancing_type",
    "model.moe_aux_loss_coeff",
    "parallel.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size",
)
"""The fields of a mixture of experts."""


def as_yaml(value: object) -> str:
    """A field's value as YAML has it; a list's items with spaces between."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "[]"
    return str(value).lower() if isinstance(value, bool) else str(value)
