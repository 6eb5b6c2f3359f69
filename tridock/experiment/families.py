"""Families of models in Hugging Face's transformers, and the names of their weights."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tridock.contracts.pretrained import GPT2_LAYERS, PLAIN_LAYERS
from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model

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
_PHI3_NAMES: Final = {**_LLAMA_NAMES, "gate": "mlp.gate_up_proj", "dense_h_to_4h": "mlp.gate_up_proj"}
_OLMO2_NAMES: Final = {
    **_LLAMA_NAMES,
    "input_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
_GPT2_NAMES: Final = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "output_layer": "lm_head",
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
    """The family's module names, by engine torch's names. SwiGLU's two matrices may be one, the gate first."""
    query_key_value: tuple[str, ...]
    """The family's one module for query, key and value, or one module for each."""
    transposes: bool = False
    """Whether the weights of layers' linear modules are [inputs, outputs]."""
    has_experts: bool = False


_LLAMA: Final = {
    **PLAIN_LAYERS,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
}


def _without(fields: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


_BIASED: Final = _without(_LLAMA, "add_attention_bias")
_THREE: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GPT2: Final = Family("GPT2LMHeadModel", "gpt2", GPT2_LAYERS, _GPT2_NAMES, ("attn.c_attn",), transposes=True)
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
    "Qwen3MoeForCausalLM", "qwen3_moe", {**_BIASED, "qk_layernorm": True}, _QWEN_MOE_NAMES, _THREE, has_experts=True
)
LLAMA: Final = Family("LlamaForCausalLM", "llama", _BIASED, _LLAMA_NAMES, _THREE)
MISTRAL: Final = Family("MistralForCausalLM", "mistral", _LLAMA, _LLAMA_NAMES, _THREE)
QWEN2: Final = Family("Qwen2ForCausalLM", "qwen2", {**_LLAMA, "add_qkv_bias": True}, _LLAMA_NAMES, _THREE)
QWEN3: Final = Family("Qwen3ForCausalLM", "qwen3", {**_BIASED, "qk_layernorm": True}, _LLAMA_NAMES, _THREE)
PHI3: Final = Family("Phi3ForCausalLM", "phi3", _LLAMA, _PHI3_NAMES, ("self_attn.qkv_proj",))
OLMO2: Final = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    {**_BIASED, "qk_layernorm": True, "qk_layernorm_all_heads": True, "use_post_norm": True},
    _OLMO2_NAMES,
    _THREE,
)
MULTIPLIERS: Final = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
GRANITE: Final = Family("GraniteForCausalLM", "granite", _without(_BIASED, *MULTIPLIERS), _LLAMA_NAMES, _THREE)
SMOLLM3: Final = Family("SmolLM3ForCausalLM", "smollm3", _without(_BIASED, "no_rope_freq"), _LLAMA_NAMES, _THREE)
FAMILIES: Final = (GPT2, LLAMA, GRANITE, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
OWN_HEADS: Final = (GPT2, QWEN2, QWEN2_MOE)
"""Whose size of a head is hidden_size / heads; transformers before 4.48 ignores another one in config.json."""
SUPPORTED: Final = ", ".join(family.architecture for family in FAMILIES)


def family_of(model: Model, names: Collection[str] = ()) -> Family:
    """Returns the family that has an experiment's model, of several that whose weights have these ``names``.

    Raises :class:`RequestError` with the fields that none has.
    """
    modules = {name.rpartition(".")[0] for name in names}

    def unlike(family: Family) -> tuple[int, bool]:
        return len(_odd_fields(model, family)), not any(it.endswith(family.query_key_value[0]) for it in modules)

    family = min(FAMILIES, key=unlike)
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
    if family in OWN_HEADS and model.attention_size != model.hidden_size:
        odd["kv_channels"] = model.kv_channels
    return [(name, str(value)) for name, value in odd.items()]
