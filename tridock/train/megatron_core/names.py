"""Maps engine torch's names of weights to megatron-core's names in a checkpoint."""

import re
from collections.abc import Sequence
from typing import Final

from tridock.experiment.model import Model

_LAYER: Final = re.compile(r"^layers\.(\d+)\.(.+)\.(weight|bias)$")
_EXPERT: Final = re.compile(r"^experts\.(\d+)\.")
_IN_LAYER: Final = {
    "input_norm": "self_attention.linear_qkv.layer_norm_",
    "attention.query_key_value": "self_attention.linear_qkv.",
    "attention.query_norm": "self_attention.q_layernorm.",
    "attention.key_norm": "self_attention.k_layernorm.",
    "attention.dense": "self_attention.linear_proj.",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
    "router": "mlp.router.",
    "gate": "mlp.linear_fc1.",
    "dense_h_to_4h": "mlp.linear_fc1.",
    "dense_4h_to_h": "mlp.linear_fc2.",
}
_SHARED: Final = "shared_expert."
_SHARED_GATE: Final = "shared_expert_gate"
_OUTSIDE: Final = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "output_layer": "output_layer",
}


def expert_of(name: str) -> int | None:
    """Returns the number of a weight's expert; None for a weight of no expert."""
    layer = _LAYER.match(name)
    expert = _EXPERT.match(layer[2]) if layer else None
    return int(expert[1]) if expert else None


def key_of(model: Model, name: str) -> str:
    """Returns megatron-core's name of a weight, or of the weight that contains it."""
    if layer := _LAYER.match(name):
        if layer[2] == _SHARED_GATE:
            return f"decoder.layers.{layer[1]}.mlp.shared_experts.gate_weight"
        module, experts = _EXPERT.subn("", layer[2])
        inside = _IN_LAYER[module.removeprefix(_SHARED)]
        if module == "mlp_norm" and model.num_moe_experts:
            inside = "pre_mlp_layernorm."
        inside = inside.replace("mlp.", "mlp.experts.experts.", experts)
        inside = inside.replace("mlp.", "mlp.shared_experts.", module.startswith(_SHARED))
        return f"decoder.layers.{layer[1]}.{inside}{layer[3]}"
    module, _, kind = name.partition(".")
    return f"{_OUTSIDE[module]}.{kind}"


def half_of(model: Model, name: str) -> int | None:
    """Returns which half of megatron-core's weight it is, because SwiGLU's two matrices are one there; else None."""
    parts = {"gate": 0, "dense_h_to_4h": 1} if model.swiglu else {}
    return parts.get(name.split(".")[-2])


def parts_of(model: Model, names: Sequence[str]) -> dict[tuple[str, int], list[str]]:
    """Returns the parts of each megatron-core weight, in order, by its name and the number of its expert."""
    parts: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names, key=lambda name: half_of(model, name) or 0):
        parts.setdefault((key_of(model, name), expert_of(name) or 0), []).append(name)
    return parts
