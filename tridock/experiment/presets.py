"""Presets: the shapes of known models, with Megatron's field names. Pure.

Each has the sizes that its authors published. A field of the experiment overrides the preset's.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

Preset = Literal[
    "gpt-small",
    "gpt-large",
    "gpt-xl",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-125m",
    "gpt3-350m",
    "gpt3-760m",
    "gpt3-1.3b",
    "gpt3-2.7b",
    "gpt3-6.7b",
    "gpt3-13b",
    "gpt3-175b",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-0.6b",
    "qwen3-8b",
    "smollm2-135m",
    "mixtral-8x7b",
    "resnet50",
]
Fields = Mapping[str, Any]


def _gpt(layers: int, heads: int, width: int, head_size: int | None = None) -> Fields:
    sizes = {"num_layers": layers, "num_attention_heads": heads, "hidden_size": width}
    return sizes if head_size is None else {**sizes, "kv_channels": head_size}


def _llama(layers: int, heads: int, groups: int, width: int, ffn: int, **others: Any) -> Fields:
    return {
        **_gpt(layers, heads, width),
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **others,
    }


_LLAMA3: Final[Fields] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rotary_base": 500000,
    "use_rope_scaling": True,
}
_QWEN3: Final[Fields] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rotary_base": 1000000,
    "norm_epsilon": 1e-6,
    "kv_channels": 128,
    "qk_layernorm": True,
}
_MIXTRAL: Final[Fields] = {
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rotary_base": 1000000,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.02,
}
_UNTIED: Final[Fields] = {"untie_embeddings_and_output_weights": True}

PRESETS: Final[Mapping[str, Fields]] = {
    # PyTorch's data parallel benchmark; gpt-xl has GPT-3 XL's heads.
    "gpt-small": _gpt(12, 12, 768),
    "gpt-large": _gpt(24, 16, 1536),
    "gpt-xl": _gpt(24, 24, 2048, 128),
    # Radford et al. (2019), table 2.
    "gpt2": _gpt(12, 12, 768),
    "gpt2-medium": _gpt(24, 16, 1024),
    "gpt2-large": _gpt(36, 20, 1280),
    "gpt2-xl": _gpt(48, 25, 1600),
    # Brown et al. (2020), table 2.1. In some, heads times head size is not hidden_size.
    "gpt3-125m": _gpt(12, 12, 768),
    "gpt3-350m": _gpt(24, 16, 1024),
    "gpt3-760m": _gpt(24, 16, 1536),
    "gpt3-1.3b": _gpt(24, 24, 2048, 128),
    "gpt3-2.7b": _gpt(32, 32, 2560),
    "gpt3-6.7b": _gpt(32, 32, 4096),
    "gpt3-13b": _gpt(40, 40, 5140, 128),
    "gpt3-175b": _gpt(96, 96, 12288),
    # From each model's config.json on Hugging Face.
    "llama-3.2-1b": _llama(16, 32, 8, 2048, 8192, **_LLAMA3, rope_scaling_factor=32.0),
    "llama-3.1-8b": _llama(32, 32, 8, 4096, 14336, **_LLAMA3, **_UNTIED),
    "llama-3.1-70b": _llama(80, 64, 8, 8192, 28672, **_LLAMA3, **_UNTIED),
    "qwen3-0.6b": _llama(28, 16, 8, 1024, 3072, **_QWEN3),
    "qwen3-8b": _llama(36, 32, 8, 4096, 12288, **_QWEN3, **_UNTIED),
    "smollm2-135m": _llama(30, 9, 3, 576, 1536, vocab_size=49152, max_position_embeddings=8192, rotary_base=100000),
    "mixtral-8x7b": _llama(32, 32, 8, 4096, 14336, **_MIXTRAL, **_UNTIED),
}
_OF_THE_WIDTH: Final = ("kv_channels", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size")
"""Sizes that apply only with the preset's own hidden_size and heads."""


def preset_fields(fields: Fields) -> Fields:
    """Returns the model's ``fields`` completed with those of its preset."""
    preset = fields.get("preset")
    given = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if {"num_attention_heads", "hidden_size"} & fields.keys():
        given = {name: value for name, value in given.items() if name not in _OF_THE_WIDTH}
    return {**given, **fields}
