"""Families of models in Hugging Face's transformers: their ``config.json``, and the names of their weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tridock.contracts.pretrained import GPT2_LAYERS
from tridock.errors import Problem, RequestError
from tridock.experiment.model import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_CONTEXT, Model

Config = Mapping[str, Any]

_LLAMA_NAMES: Final = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "output_layer": "lm_head",
    "layers": "model.layers",
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.dense": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "dense_h_to_4h": "mlp.up_proj",
    "dense_4h_to_h": "mlp.down_proj",
}
_MIXTRAL_NAMES: Final = {
    **{name: theirs for name, theirs in _LLAMA_NAMES.items() if not theirs.startswith("mlp.")},
    "router": "block_sparse_moe.gate",
    "experts": "block_sparse_moe.experts",
    "experts.gate": "w1",
    "experts.dense_h_to_4h": "w3",
    "experts.dense_4h_to_h": "w2",
}
_QWEN_MOE_NAMES: Final = {
    **_MIXTRAL_NAMES,
    "router": "mlp.gate",
    "experts": "mlp.experts",
    "experts.gate": "gate_proj",
    "experts.dense_h_to_4h": "up_proj",
    "experts.dense_4h_to_h": "down_proj",
    "shared_expert.gate": "mlp.shared_expert.gate_proj",
    "shared_expert.dense_h_to_4h": "mlp.shared_expert.up_proj",
    "shared_expert.dense_4h_to_h": "mlp.shared_expert.down_proj",
    "shared_expert_gate": "mlp.shared_expert_gate",
}
_GPT2_NAMES: Final = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "layers": "transformer.h",
    "input_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.dense": "attn.c_proj",
    "dense_h_to_4h": "mlp.c_fc",
    "dense_4h_to_h": "mlp.c_proj",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one architecture."""

    architecture: str
    model_type: str
    required: Mapping[str, Any]
    """Fields of the experiment's model that must have these values."""
    names: Mapping[str, str]
    """The family's module names, by engine torch's names."""
    query_key_value: tuple[str, ...]
    """The family's one module for query, key and value, or one module for each."""
    transposes: bool = False
    """Whether the weights of linear layers are [inputs, outputs]."""
    has_experts: bool = False


_LLAMA: Final = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
}
_THREE: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GPT2: Final = Family(
    "GPT2LMHeadModel",
    "gpt2",
    GPT2_LAYERS,
    _GPT2_NAMES,
    ("attn.c_attn",),
    transposes=True,
)
MIXTRAL: Final = Family(
    "MixtralForCausalLM",
    "mixtral",
    {**_LLAMA, "moe_router_pre_softmax": False},
    _MIXTRAL_NAMES,
    _THREE,
    has_experts=True,
)
QWEN2_MOE: Final = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    {**_LLAMA, "add_qkv_bias": True, "moe_shared_expert_gate": True},
    _QWEN_MOE_NAMES,
    _THREE,
    has_experts=True,
)
QWEN3_MOE: Final = Family(
    "Qwen3MoeForCausalLM", "qwen3_moe", {**_LLAMA, "qk_layernorm": True}, _QWEN_MOE_NAMES, _THREE, has_experts=True
)
FAMILIES: Final = (
    GPT2,
    Family("LlamaForCausalLM", "llama", _LLAMA, _LLAMA_NAMES, _THREE),
    Family("Qwen2ForCausalLM", "qwen2", {**_LLAMA, "add_qkv_bias": True}, _LLAMA_NAMES, _THREE),
    Family("Qwen3ForCausalLM", "qwen3", {**_LLAMA, "qk_layernorm": True}, _LLAMA_NAMES, _THREE),
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
SUPPORTED: Final = ", ".join(family.architecture for family in FAMILIES)


def family_of(model: Model) -> Family:
    """Returns the family that has an experiment's model. Raises :class:`RequestError` with the fields that none has."""
    family = min(FAMILIES, key=lambda one: len(_odd_fields(model, one)))
    if odd := _odd_fields(model, family):
        todo = f"transformers' {family.architecture} is the nearest; {SUPPORTED} are supported"
        problems = [Problem(f"model.{name}", "has no counterpart in transformers", got, todo) for name, got in odd]
        raise RequestError(problems)
    return family


def _odd_fields(model: Model, family: Family) -> list[tuple[str, str]]:
    odd = {name: getattr(model, name) for name, value in family.required.items() if getattr(model, name) != value}
    if family is GPT2 and model.query_groups != model.num_attention_heads:
        odd["num_query_groups"] = model.num_query_groups
    if family.has_experts != (model.num_moe_experts is not None):
        odd["num_moe_experts"] = model.num_moe_experts
    if (family is QWEN2_MOE) != (model.moe_shared_expert_intermediate_size is not None):
        odd["moe_shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size
    if family.model_type in ("gpt2", "qwen2", "qwen2_moe") and model.attention_size != model.hidden_size:
        odd["kv_channels"] = model.kv_channels
    return [(name, str(value)) for name, value in odd.items()]


def config_of(model: Model, tokens: int, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Returns the ``config.json`` of a model with ``tokens`` in its vocabulary."""
    family = family_of(model)
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": tokens,
        "torch_dtype": dtype,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }
    if family is GPT2:
        return {
            **common,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_embd": model.hidden_size,
            "n_inner": model.ffn_size,
            "n_positions": model.positions,
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": "gelu" if model.gelu == "gelu" else "gelu_new",
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
        }
    scaling = {
        "rope_type": "llama3",
        "factor": model.rope_scaling_factor,
        "low_freq_factor": LOW_FREQUENCY,
        "high_freq_factor": HIGH_FREQUENCY,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
    return {
        **common,
        **(_experts_of(model, family) if family.has_experts else {}),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.expert_size if family is MIXTRAL else model.ffn_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": scaling if model.use_rope_scaling else None,
        "attention_dropout": model.attention_dropout,
    }


def _experts_of(model: Model, family: Family) -> dict[str, Any]:
    """Returns what ``config.json`` says of a mixture of experts."""
    common = {"num_experts_per_tok": model.moe_router_topk, "router_aux_loss_coef": model.moe_aux_loss_coeff}
    if family is MIXTRAL:
        return {**common, "num_local_experts": model.num_moe_experts, "sliding_window": None}
    shared = {"shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size}
    return {
        **common,
        **(shared if family is QWEN2_MOE else {}),
        "num_experts": model.num_moe_experts,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _expert_fields(config: Config, family: Family) -> dict[str, Any]:
    """Returns the fields of a mixture of experts that correspond to a ``config.json``."""
    if family is MIXTRAL:
        return {
            "moe_ffn_hidden_size": config["intermediate_size"],
            "num_moe_experts": config.get("num_local_experts", 8),
            "moe_router_topk": config.get("num_experts_per_tok", 2),
        }
    shared = {"moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size")}
    return {
        **(shared if family is QWEN2_MOE else {}),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        # transformers 5 writes Qwen 3's number of experts by Mixtral's name.
        "num_moe_experts": config.get("num_experts") or config["num_local_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def model_fields(config: Config, where: str) -> dict[str, Any]:
    """Returns the fields of an experiment's model that correspond to a ``config.json``.

    Raises :class:`RequestError` if its architecture, or an option of it, is not supported.
    """
    names = config.get("architectures") or [config.get("model_type")]
    family = next((one for one in FAMILIES if names[0] in (one.architecture, one.model_type)), None)
    if family is None:
        what, todo = "is of an architecture that is not supported", f"use one of {SUPPORTED}"
        raise RequestError(Problem(where, what, str(names[0]), todo))
    if family is GPT2:
        fields: dict[str, Any] = {
            "num_layers": config["n_layer"],
            "num_attention_heads": config["n_head"],
            "hidden_size": config["n_embd"],
            "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
            "max_position_embeddings": config["n_positions"],
            "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
            "activation_func": "gelu" if config.get("activation_function") == "gelu" else "gelu_tanh",
        }
        odd: dict[str, tuple[Any, ...]] = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
            "scale_attn_by_inverse_layer_idx": (False,),
        }
    else:
        heads = config["num_attention_heads"]
        rope: Config = config.get("rope_parameters") or {}
        scaling: dict[str, Any] = {**(config.get("rope_scaling") or {}), **rope}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        fields = {
            "num_layers": config["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "max_position_embeddings": config["max_position_embeddings"],
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "rotary_base": int(scaling.get("rope_theta") or config.get("rope_theta", 10000)),
            "use_rope_scaling": kind == "llama3",
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", family.model_type == "gpt2"),
        }
        if kind == "llama3":
            fields["rope_scaling_factor"] = float(scaling["factor"])
        if family.has_experts:
            del fields["ffn_hidden_size"]  # of a layer without experts
            fields |= _expert_fields(config, family)
        config = {**config, "rope_type": kind, **{f"rope.{name}": scaling.get(name) for name in _STRETCH}}
        odd = {
            "rope_type": ("default", "llama3"),
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "use_sliding_window": (False,),
            **({"sliding_window": (None,), "router_jitter_noise": (0.0,)} if family is MIXTRAL else {}),
            **({"qkv_bias": (True,)} if family is QWEN2_MOE else {}),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            **({f"rope.{name}": (value,) for name, value in _STRETCH.items()} if kind == "llama3" else {}),
        }
    problems = [
        Problem(f"{where}: {name}", "is not supported", str(config[name]), f"use a model that has {choices[0]}")
        for name, choices in odd.items()
        if config.get(name, choices[0]) not in choices
    ]
    if problems:
        raise RequestError(problems)
    return {"num_moe_experts": None, **family.required, **fields, "vocab_size": config["vocab_size"]}


_STRETCH: Final = {
    "low_freq_factor": LOW_FREQUENCY,
    "high_freq_factor": HIGH_FREQUENCY,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
