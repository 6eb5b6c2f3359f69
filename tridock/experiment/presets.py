"""Presets: the shapes of known models, with Megatron's field names. Pure.

Each has the sizes that its authors published. A field of the experiment overrides the preset's.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

_Gpt2 = Literal["gpt-small", "gpt-large", "gpt-xl", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
_Gpt3 = Literal["gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "gpt3-175b"]
_Llama = Literal["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.3-70b"]
_Qwen2 = Literal[
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b"
]
_Qwen3 = Literal["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"]
_Qwen3Moe = Literal["qwen3-30b-a3b", "qwen3-235b-a22b"]
_SmolLM = Literal["smollm2-135m", "smollm2-360m", "smollm2-1.7b", "smollm3-3b"]
_Olmo2 = Literal["olmo2-1b", "olmo2-7b", "olmo2-13b", "olmo2-32b"]
_Mistral = Literal["mistral-7b-v0.3", "mistral-nemo", "mixtral-8x7b"]
Preset = Literal[_Gpt2, _Gpt3, _Llama, _Qwen2, _Qwen3, _Qwen3Moe, _SmolLM, _Mistral, _Olmo2, "phi-4", "resnet50"]
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
_QWEN25: Final[Fields] = {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rotary_base": 1000000,
    "norm_epsilon": 1e-6,
    "add_qkv_bias": True,
}
_QWEN25_7B: Final[Fields] = {
    **_QWEN25,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "untie_embeddings_and_output_weights": True,
}
_QWEN25_14B: Final[Fields] = {**_QWEN25_7B, "norm_epsilon": 1e-5}
_QWEN3: Final[Fields] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rotary_base": 1000000,
    "norm_epsilon": 1e-6,
    "kv_channels": 128,
    "qk_layernorm": True,
}
_QWEN3_MOE: Final[Fields] = {
    **_QWEN3,
    "num_moe_experts": 128,
    "moe_router_topk": 8,
    "moe_aux_loss_coeff": 0.001,
    "untie_embeddings_and_output_weights": True,
}
_SMOLLM2: Final[Fields] = {"vocab_size": 49152, "max_position_embeddings": 8192, "rotary_base": 100000}
_SMOLLM3: Final[Fields] = {
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rotary_base": 5000000,
    "norm_epsilon": 1e-6,
    "no_rope_freq": 4,
}
_MISTRAL: Final[Fields] = {
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rotary_base": 1000000,
    "untie_embeddings_and_output_weights": True,
}
_NEMO: Final[Fields] = {**_MISTRAL, "vocab_size": 131072, "max_position_embeddings": 128000, "kv_channels": 128}
_MIXTRAL: Final[Fields] = {
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rotary_base": 1000000,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.02,
}
_PHI4: Final[Fields] = {"vocab_size": 100352, "max_position_embeddings": 16384, "rotary_base": 250000}
_UNTIED: Final[Fields] = {"untie_embeddings_and_output_weights": True}
_OLMO2: Final[Fields] = {
    **_UNTIED,
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rotary_base": 500000,
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "qk_layernorm_all_heads": True,
    "use_post_norm": True,
}

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
    # From each base model's config.json on Hugging Face.
    "llama-3.1-8b": _llama(32, 32, 8, 4096, 14336, **_LLAMA3, **_UNTIED),
    "llama-3.1-70b": _llama(80, 64, 8, 8192, 28672, **_LLAMA3, **_UNTIED),
    "llama-3.1-405b": _llama(126, 128, 8, 16384, 53248, **_LLAMA3, **_UNTIED),
    "llama-3.2-1b": _llama(16, 32, 8, 2048, 8192, **_LLAMA3, rope_scaling_factor=32.0),
    "llama-3.2-3b": _llama(28, 24, 8, 3072, 8192, **_LLAMA3, rope_scaling_factor=32.0),
    "llama-3.3-70b": _llama(80, 64, 8, 8192, 28672, **_LLAMA3, **_UNTIED),
    "qwen2.5-0.5b": _llama(24, 14, 2, 896, 4864, **_QWEN25),
    "qwen2.5-1.5b": _llama(28, 12, 2, 1536, 8960, **{**_QWEN25, "max_position_embeddings": 131072}),
    "qwen2.5-3b": _llama(36, 16, 2, 2048, 11008, **_QWEN25),
    "qwen2.5-7b": _llama(28, 28, 4, 3584, 18944, **_QWEN25_7B),
    "qwen2.5-14b": _llama(48, 40, 8, 5120, 13824, **_QWEN25_14B),
    "qwen2.5-32b": _llama(64, 40, 8, 5120, 27648, **_QWEN25_14B),
    "qwen2.5-72b": _llama(80, 64, 8, 8192, 29568, **_QWEN25_14B),
    "qwen3-0.6b": _llama(28, 16, 8, 1024, 3072, **_QWEN3),
    "qwen3-1.7b": _llama(28, 16, 8, 2048, 6144, **_QWEN3),
    "qwen3-4b": _llama(36, 32, 8, 2560, 9728, **_QWEN3),
    "qwen3-8b": _llama(36, 32, 8, 4096, 12288, **_QWEN3, **_UNTIED),
    "qwen3-14b": _llama(40, 40, 8, 5120, 17408, **_QWEN3, **_UNTIED),
    "qwen3-32b": _llama(64, 64, 8, 5120, 25600, **_QWEN3, **_UNTIED),
    "qwen3-30b-a3b": _llama(48, 32, 4, 2048, 6144, **_QWEN3_MOE, moe_ffn_hidden_size=768),
    "qwen3-235b-a22b": _llama(94, 64, 4, 4096, 12288, **_QWEN3_MOE, moe_ffn_hidden_size=1536),
    "smollm2-135m": _llama(30, 9, 3, 576, 1536, **_SMOLLM2),
    "smollm2-360m": _llama(32, 15, 5, 960, 2560, **_SMOLLM2),
    "smollm2-1.7b": _llama(24, 32, 32, 2048, 8192, **{**_SMOLLM2, "rotary_base": 130000}),
    "smollm3-3b": _llama(36, 16, 4, 2048, 11008, **_SMOLLM3),
    "mistral-7b-v0.3": _llama(32, 32, 8, 4096, 14336, **_MISTRAL),
    "mistral-nemo": _llama(40, 32, 8, 5120, 14336, **_NEMO),
    "phi-4": _llama(40, 40, 10, 5120, 17920, **_PHI4, **_UNTIED),
    "olmo2-1b": _llama(16, 16, 16, 2048, 8192, **_OLMO2),
    "olmo2-7b": _llama(32, 32, 32, 4096, 11008, **_OLMO2),
    "olmo2-13b": _llama(40, 40, 40, 5120, 13824, **_OLMO2),
    "olmo2-32b": _llama(64, 40, 8, 5120, 27648, **_OLMO2),
    "mixtral-8x7b": _llama(32, 32, 8, 4096, 14336, **_MIXTRAL, **_UNTIED),
}
_OF_THE_WIDTH: Final = ("kv_channels", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size")
"""Sizes that apply only with the preset's own hidden_size and heads."""
_OF_NO_PRESET: Final = (
    *("seq_length", "checkpoint_activations", "checkpoint_num_layers", "partition_activations", "checkpoint_in_cpu"),
    *("contiguous_checkpointing", "synchronize_each_layer", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "transformer_impl", "fp8"),
)
"""Fields that say how a model is trained; all others say which model it is."""


def preset_fields(fields: Fields) -> Fields:
    """Returns the model's ``fields`` completed with those of its preset."""
    preset = fields.get("preset")
    given = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if any(fields.get(name, given.get(name)) != given.get(name) for name in ("num_attention_heads", "hidden_size")):
        given = {name: value for name, value in given.items() if name not in _OF_THE_WIDTH}
    return {**given, **fields}


def replaced_by(preset: object, fields: Fields) -> Fields:
    """Returns what remains of a file's model ``fields`` if ``--set`` names another preset: how the model is trained.

    For resnet50 nothing remains. A value that is no preset changes nothing; the schema refuses it.
    """
    if preset not in get_args(Preset):
        return fields
    return how_trained(fields) if preset in PRESETS else {}


def how_trained(fields: Fields) -> Fields:
    """Returns those of a model's ``fields`` that say how it is trained."""
    return {name: value for name, value in fields.items() if name in _OF_NO_PRESET}
