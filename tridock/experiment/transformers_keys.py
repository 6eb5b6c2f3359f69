"""The keys of ``config.json`` of transformers' models: what each of them does. No I/O.

Each is honoured, without effect, or has one value; a file with any other key is refused. What each key does, and the
defaults, are those of transformers 4.30 to 5: ``models/*/configuration_*.py`` and ``modeling_*.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tridock.experiment.families import (
    GPT2,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    MULTIPLIERS,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
    Family,
)
from tridock.experiment.model import HIGH_FREQUENCY, LOW_FREQUENCY

WHOLE: Final = "whole number"
FLOAT: Final = "floating point number"
NUMBER: Final = "number"
ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Honoured:
    """A field of the experiment's model has the key's value."""

    field: str
    kind: str | Mapping[Any, Any] = WHOLE
    """Of the value; or for each value of the key that of the field."""
    default: Any = ABSENT
    """What transformers' class has without the key; None if that follows from other keys, as the field's own default
    does. ABSENT: the key is required."""
    or_null: bool = False
    """Whether the key may be null, which means the field's own default."""


@dataclass(frozen=True, slots=True)
class OfExperiment:
    """No model depends on the key: a run goes by this field of the experiment's model, which an export writes."""

    field: str


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """No logit depends on the key."""

    why: str


@dataclass(frozen=True, slots=True)
class Only:
    """The key has one of these values, of which the first is written; the model is another one with any other."""

    values: Sequence[Any]
    of_each: bool = False
    """Whether the first is that of each item in a list."""
    is_required: bool = False
    """Whether transformers' class has another value without the key, or none."""
    what: str = "is not supported"


Key = Honoured | OfExperiment | WithoutEffect | Only
Keys = Mapping[str, Key]


def _without_effect(why: str, names: str) -> Keys:
    return dict.fromkeys(names.split(), WithoutEffect(why))


_NULL: Final = Only((None,))
_FALSE: Final = Only((False,))
_NOT: Final = {False: True, True: False}
_BIAS: Final = Honoured("add_attention_bias", {False: False, True: True}, default=False)
COMMON: Final[Keys] = {
    "vocab_size": Honoured("vocab_size"),
    "initializer_range": OfExperiment("init_method_std"),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"), _FALSE),
    **dict.fromkeys(("rope_interleaved", "use_mrope"), _FALSE),
    **dict.fromkeys(("quantization_config", "cross_attention_hidden_size"), _NULL),
    "auto_map": Only(({},)),
    "pruned_heads": Only(({}, None)),
    **_without_effect(
        "says where the file comes from",
        "transformers_version transformers.js_config _name_or_path name_or_path _commit_hash finetuning_task"
        " unsloth_fixed unsloth_version is_llama_config",
    ),
    **_without_effect("each weight says its format", "torch_dtype dtype use_bfloat16"),
    **_without_effect(
        "the tokenizer says it",
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix",
    ),
    **_without_effect(
        "another way to compute the same",
        "use_cache output_past _attn_implementation _attn_implementation_autoset attn_implementation"
        " _flash_attn_2_enabled chunk_size_feed_forward gradient_checkpointing torchscript pretraining_tp",
    ),
    **_without_effect(
        "what transformers returns beside the logits",
        "output_attentions output_hidden_states output_router_logits return_dict use_return_dict is_decoder",
    ),
    **_without_effect(
        "of models for other tasks",
        "id2label label2id num_labels _num_labels problem_type task_specific_params tf_legacy_loss",
    ),
    **_without_effect(
        "a default of transformers' generate()",
        "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k"
        " top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size"
        " bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id"
        " forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens"
        " begin_suppress_tokens max_new_tokens",
    ),
}
_OF_GPT2: Final[Keys] = {
    "n_layer": Honoured("num_layers"),
    "n_head": Honoured("num_attention_heads"),
    "n_embd": Honoured("hidden_size"),
    "n_inner": Honoured("ffn_hidden_size", default=None, or_null=True),
    "n_positions": Honoured("max_position_embeddings", default=1024),
    "n_ctx": OfExperiment("max_position_embeddings"),  # llama.cpp reads it
    "layer_norm_epsilon": Honoured("norm_epsilon", FLOAT, 1e-5),
    "activation_function": Honoured(
        "activation_func", {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}, "gelu_new"
    ),
    "tie_word_embeddings": Honoured("untie_embeddings_and_output_weights", _NOT, default=True),
    "scale_attn_weights": Only((True,)),
    "scale_attn_by_inverse_layer_idx": _FALSE,
    "resid_pdrop": OfExperiment("hidden_dropout"),
    "embd_pdrop": OfExperiment("hidden_dropout"),
    "attn_pdrop": OfExperiment("attention_dropout"),
    **_without_effect("another way to compute the same", "reorder_and_upcast_attn"),
    **_without_effect("of older versions", "n_special predict_special_tokens"),
    **_without_effect(
        "of models for other tasks",
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj",
    ),
}
_GROUPS: Final = Honoured("num_query_groups", default=None, or_null=True)
_HEAD: Final = Honoured("kv_channels", default=None, or_null=True)
_OF_ROPE: Final[Keys] = {
    "num_hidden_layers": Honoured("num_layers"),
    "num_attention_heads": Honoured("num_attention_heads"),
    "num_key_value_heads": _GROUPS,
    "head_dim": _HEAD,
    "hidden_size": Honoured("hidden_size"),
    "max_position_embeddings": Honoured("max_position_embeddings", default=32768),
    "rms_norm_eps": Honoured("norm_epsilon", FLOAT, 1e-6),
    "rope_theta": Honoured("rotary_base", NUMBER, 10000),
    "tie_word_embeddings": Honoured("untie_embeddings_and_output_weights", _NOT, default=False),
    "hidden_act": Only(("silu",)),
    "attention_dropout": OfExperiment("attention_dropout"),
}
_OF_LLAMA: Final[Keys] = {
    **_OF_ROPE,
    "intermediate_size": Honoured("ffn_hidden_size"),
    "max_position_embeddings": Honoured("max_position_embeddings", default=2048),
    "attention_bias": _BIAS,
    "mlp_bias": _FALSE,
}
_OF_QWEN2: Final[Keys] = {
    **_OF_ROPE,
    "intermediate_size": Honoured("ffn_hidden_size"),
    "num_key_value_heads": replace(_GROUPS, default=32),
    "use_sliding_window": _FALSE,
    "layer_types": Only(("full_attention", None), of_each=True),
    **_without_effect("use_sliding_window is false", "sliding_window max_window_layers"),
}
_OF_QWEN3: Final[Keys] = {**_OF_QWEN2, "head_dim": Honoured("kv_channels", default=128), "attention_bias": _BIAS}
_OF_MISTRAL: Final[Keys] = {
    **_OF_ROPE,
    "intermediate_size": Honoured("ffn_hidden_size"),
    "max_position_embeddings": Honoured("max_position_embeddings", default=131072),
    "num_key_value_heads": replace(_GROUPS, default=8),
    "sliding_window": replace(_NULL, is_required=True),
}
_OF_PHI3: Final[Keys] = {
    **_OF_ROPE,
    "intermediate_size": Honoured("ffn_hidden_size"),
    "max_position_embeddings": Honoured("max_position_embeddings", default=4096),
    "rms_norm_eps": Honoured("norm_epsilon", FLOAT, 1e-5),
    "partial_rotary_factor": Only((1.0, 1)),
    "sliding_window": _NULL,
    "attention_bias": _FALSE,
    "resid_pdrop": OfExperiment("hidden_dropout"),
    "embd_pdrop": OfExperiment("hidden_dropout"),
    **_without_effect("of another rope_type", "original_max_position_embeddings"),
}
_OF_EXPERTS: Final[Keys] = {
    "num_experts_per_tok": Honoured("moe_router_topk"),
    "router_aux_loss_coef": OfExperiment("moe_aux_loss_coeff"),
}
_OF_QWEN_EXPERTS: Final[Keys] = {
    **_OF_EXPERTS,
    "num_experts": Honoured("num_moe_experts"),
    "moe_intermediate_size": Honoured("moe_ffn_hidden_size"),
    "norm_topk_prob": Honoured("moe_router_pre_softmax", _NOT, default=False),
    "intermediate_size": OfExperiment("ffn_hidden_size"),  # of layers without experts
    "decoder_sparse_step": Only((1,)),
    "mlp_only_layers": Only(([], None)),
}
OWN: Final[Mapping[str, Keys]] = {
    GPT2.model_type: _OF_GPT2,
    LLAMA.model_type: _OF_LLAMA,
    GRANITE.model_type: {**_OF_LLAMA, **{name: Honoured(name, NUMBER, 1.0) for name in MULTIPLIERS}},
    MISTRAL.model_type: _OF_MISTRAL,
    PHI3.model_type: _OF_PHI3,
    OLMO2.model_type: {
        **_OF_ROPE,
        "intermediate_size": Honoured("ffn_hidden_size"),
        "max_position_embeddings": Honoured("max_position_embeddings", default=2048),
        "rms_norm_eps": Honoured("norm_epsilon", FLOAT, 1e-5),
        "attention_bias": _BIAS,
    },
    QWEN2.model_type: _OF_QWEN2,
    QWEN3.model_type: _OF_QWEN3,
    SMOLLM3.model_type: {
        **_OF_QWEN3,
        "num_key_value_heads": replace(_GROUPS, default=4),
        "head_dim": _HEAD,
        "rope_theta": Honoured("rotary_base", NUMBER, 2000000),
        "tie_word_embeddings": Honoured("untie_embeddings_and_output_weights", _NOT, default=True),
        "mlp_bias": _FALSE,
        "no_rope_layer_interval": Honoured("no_rope_freq", default=4),
        "no_rope_layers": _NULL,
    },
    MIXTRAL.model_type: {
        **_OF_MISTRAL,
        **_OF_EXPERTS,
        "intermediate_size": Honoured("moe_ffn_hidden_size"),
        "num_local_experts": Honoured("num_moe_experts", default=8),
        "num_experts_per_tok": Honoured("moe_router_topk", default=2),
        "rms_norm_eps": Honoured("norm_epsilon", FLOAT, 1e-5),
        "rope_theta": Honoured("rotary_base", NUMBER, 1000000),
        "sliding_window": _NULL,
        "router_jitter_noise": Only((0.0,)),
    },
    QWEN2_MOE.model_type: {
        **_OF_QWEN2,
        **_OF_QWEN_EXPERTS,
        "num_key_value_heads": replace(_GROUPS, default=16),
        "shared_expert_intermediate_size": Honoured("moe_shared_expert_intermediate_size"),
        "qkv_bias": Only((True,)),
    },
    QWEN3_MOE.model_type: {
        **_OF_QWEN3,
        **_OF_QWEN_EXPERTS,
        "num_key_value_heads": replace(_GROUPS, default=4),
        "head_dim": _HEAD,
        "num_local_experts": Honoured("num_moe_experts"),  # as transformers 5 names it
    },
}
_FACTOR: Final[Keys] = {"factor": Honoured("rope_scaling_factor", NUMBER)}
_CONTEXT: Final[Keys] = {"original_max_position_embeddings": Honoured("original_max_position_embeddings")}
ROPE_TYPES: Final[Mapping[str, Keys]] = {
    "default": {},
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        "low_freq_factor": Only((LOW_FREQUENCY, int(LOW_FREQUENCY)), is_required=True),
        "high_freq_factor": Only((HIGH_FREQUENCY, int(HIGH_FREQUENCY)), is_required=True),
        **_CONTEXT,
    },
    "yarn": {
        **_FACTOR,
        **_CONTEXT,
        "beta_fast": Only((32.0, 32, None)),
        "beta_slow": Only((1.0, 1, None)),
        "truncate": Only((True,)),
        **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), _NULL),
    },
}
"""Types of ``rope_parameters`` and ``rope_scaling``, each with its own keys."""


def keys_of(family: Family) -> Keys:
    """Returns every key of ``config.json`` that is known, but ``rope_parameters`` and ``rope_scaling``."""
    return {**COMMON, **own_keys(family)}


def own_keys(family: Family) -> Keys:
    """Returns those that depend on the family."""
    return {
        "architectures": Only((family.architecture, None), of_each=True),
        "model_type": Only((family.model_type,), is_required=True, what="contradicts architectures"),
        **OWN[family.model_type],
    }


def rotation_keys(kind: str, base: Key, types: Sequence[str] = tuple(ROPE_TYPES)) -> Keys:
    """Returns the keys in ``rope_parameters`` and ``rope_scaling`` of a type of rotations, whose ``base`` is a key.

    ``types``: those that the family may have.
    """
    return {
        **dict.fromkeys(("rope_type", "type"), Only((kind,) if kind in types else types)),
        "rope_theta": base,
        "partial_rotary_factor": Only((1.0, 1)),
        **ROPE_TYPES.get(kind, {}),
    }
