"""Each key of ``config.json`` is honoured, without effect or of one value, and any other is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tridock.errors import RequestError
from tridock.experiment.families import FAMILIES, Family
from tridock.experiment.model import Model
from tridock.experiment.transformers_config import config_of, model_fields
from tridock.experiment.transformers_keys import ABSENT, Honoured, Only, keys_of

BY_TYPE = {family.model_type: family for family in FAMILIES}
ROTATIONS = ("rope_parameters", "rope_theta")


def of(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [BY_TYPE[kind].architecture],
        "model_type": kind,
        "transformers_version": "4.43.0",
        **fields,
    }


STRETCH = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
USUAL: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True,
}  # fmt: skip
QWEN = {"max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False, "rope_theta": 1000000.0}
EXPERTS = {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        of("gpt2", activation_function="gelu_new", attn_pdrop=0.1, bos_token_id=50256, embd_pdrop=0.1,
           eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, n_ctx=1024, n_embd=768, n_head=12,
           n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
           summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True, vocab_size=50257,
           task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, n_special=0,
           predict_special_tokens=True, output_past=True),
        {"num_layers": 12, "activation_func": "gelu_tanh", "untie_embeddings_and_output_weights": False},
    ),
    "llama 3.1 8b": (
        of("llama", **USUAL, attention_bias=False, hidden_size=4096, intermediate_size=14336, mlp_bias=False,
           max_position_embeddings=131072, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
           pretraining_tp=1, rope_scaling={**STRETCH, "rope_type": "llama3"}, rope_theta=500000.0, vocab_size=128256),
        {"rotary_base": 500000, "use_rope_scaling": True, "rope_scaling_factor": 8.0, "num_query_groups": 8},
    ),
    "smollm2 135m": (
        of("llama", **USUAL | {"tie_word_embeddings": True}, attention_bias=False, hidden_size=576, pretraining_tp=1,
           intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, num_attention_heads=9,
           num_hidden_layers=30, num_key_value_heads=3, rope_interleaved=False, rope_scaling=None, rope_theta=100000,
           vocab_size=49152, **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
        {"rotary_base": 100000, "untie_embeddings_and_output_weights": False},
    ),
    "seed coder, as a llama": (
        of("llama", **USUAL, attention_bias=True, head_dim=128, hidden_size=3584, intermediate_size=14336,
           max_position_embeddings=32768, mlp_bias=False, num_attention_heads=32, num_hidden_layers=32,
           num_key_value_heads=8, rope_scaling=None, rope_theta=500000.0, vocab_size=155136),
        {"add_attention_bias": True, "add_bias_linear": False, "add_qkv_bias": False},
    ),
    "qwen 2.5 7b": (
        of("qwen2", **USUAL, **QWEN, hidden_size=3584, intermediate_size=18944, max_position_embeddings=131072,
           num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, use_mrope=False, vocab_size=152064),
        {"add_qkv_bias": True, "num_query_groups": 4},
    ),
    "qwen 2.5 7b for 128k tokens": (
        of("qwen2", **USUAL, **QWEN, hidden_size=3584, intermediate_size=18944, max_position_embeddings=131072,
           num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, vocab_size=152064,
           rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}),
        {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "a llama for 8k tokens": (
        of("llama", **USUAL, hidden_size=4096, intermediate_size=11008, max_position_embeddings=8192,
           num_attention_heads=32, num_hidden_layers=32, rope_scaling={"factor": 2.0, "type": "linear"},
           vocab_size=32000),
        {"use_rope_scaling": True, "rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    ),
    "qwen 3 0.6b": (
        of("qwen3", **USUAL, **QWEN | {"sliding_window": None, "rope_theta": 1000000}, attention_bias=False,
           head_dim=128, hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960, vocab_size=151936,
           num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rope_scaling=None),
        {"kv_channels": 128, "qk_layernorm": True},
    ),
    "qwen 3 30b a3b": (
        of("qwen3_moe", **USUAL, **QWEN, **EXPERTS, attention_bias=False, head_dim=128, hidden_size=2048,
           intermediate_size=6144, max_position_embeddings=40960, mlp_only_layers=[], moe_intermediate_size=768,
           norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
           num_key_value_heads=4, rope_scaling=None, vocab_size=151936),
        {"num_moe_experts": 128, "moe_router_pre_softmax": False, "moe_ffn_hidden_size": 768},
    ),
    "qwen 1.5 moe a2.7b": (
        of("qwen2_moe", **USUAL, **QWEN, **EXPERTS, hidden_size=2048, intermediate_size=5632, norm_topk_prob=False,
           max_position_embeddings=8192, moe_intermediate_size=1408, num_attention_heads=16, num_experts=60,
           num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=16, vocab_size=151936,
           shared_expert_intermediate_size=5632),
        {"moe_shared_expert_intermediate_size": 5632, "moe_router_pre_softmax": True},
    ),
    "mistral 7b v0.3": (
        of("mistral", **USUAL, hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
           num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rope_theta=1000000.0,
           sliding_window=None, vocab_size=32768),
        {"num_query_groups": 8, "ffn_hidden_size": 14336, "num_moe_experts": None},
    ),
    "phi 4": (
        of("phi3", **USUAL, attention_bias=False, embd_pdrop=0.0, hidden_size=5120, intermediate_size=17920,
           max_position_embeddings=16384, num_attention_heads=40, num_hidden_layers=40, num_key_value_heads=10,
           original_max_position_embeddings=16384, pad_token_id=100349, resid_pdrop=0.0, rope_scaling=None,
           rope_theta=250000, sliding_window=None, vocab_size=100352),
        {"num_query_groups": 10, "rotary_base": 250000},
    ),
    "olmo 2 7b": (
        of("olmo2", **USUAL, attention_bias=False, hidden_size=4096, intermediate_size=11008,
           max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
           pad_token_id=100277, rope_scaling=None, rope_theta=500000, vocab_size=100352),
        {"use_post_norm": True, "qk_layernorm": True, "qk_layernorm_all_heads": True},
    ),
    "granite 3.3 8b": (
        of("granite", **USUAL | {"tie_word_embeddings": True}, attention_bias=False, attention_multiplier=0.0078125,
           embedding_multiplier=12.0, hidden_size=4096, intermediate_size=12800, logits_scaling=16.0, mlp_bias=False,
           max_position_embeddings=131072, num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=8,
           residual_multiplier=0.22, rope_scaling=None, rope_theta=10000000.0, vocab_size=49159),
        {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
    ),
    "smollm 3": (
        of("smollm3", **USUAL | {"tie_word_embeddings": True}, **QWEN | {"rope_theta": 5000000.0}, attention_bias=False,
           hidden_size=2048, intermediate_size=11008, layer_types=["full_attention"] * 36, mlp_bias=False,
           max_position_embeddings=65536, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
           num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=4, pretraining_tp=2, rope_scaling=None,
           vocab_size=128256),
        {"no_rope_freq": 4, "rotary_base": 5000000, "num_query_groups": 4},
    ),
    "mixtral 8x7b": (
        of("mixtral", **USUAL, hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
           num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8,
           num_local_experts=8, output_router_logits=False, rope_theta=1000000.0, router_aux_loss_coef=0.02,
           sliding_window=None, vocab_size=32000),
        {"num_moe_experts": 8, "moe_ffn_hidden_size": 14336},
    ),
}  # fmt: skip
"""What config.json of these models has on Hugging Face, and fields that it says."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name: str) -> None:
    config, wanted = PUBLISHED[name]
    found = model_fields(config, "config.json")
    assert {field: found[field] for field in wanted} == wanted


@pytest.mark.parametrize("family", FAMILIES, ids=BY_TYPE)
def test_every_key_of_transformers_is_known_with_its_default(family: Family) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = type(transformers.AutoConfig.for_model(family.model_type))
    defaults, known = theirs().to_dict(), keys_of(family)
    assert {*defaults} - {*known} - {*ROTATIONS} == set()
    defaults |= {
        "rope_theta": (defaults.get("rope_parameters") or {}).get("rope_theta"),
        "model_type": theirs.model_type,
    }
    for key, it in known.items():
        if isinstance(it, Honoured) and it.default not in (ABSENT, None):
            assert defaults[key] == it.default, key
        elif (
            isinstance(it, Only) and key in defaults and not it.of_each and key not in ("model_type", "no_rope_layers")
        ):
            assert (defaults[key] in it.values) != it.is_required, key


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_what_transformers_and_tridock_read(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = model_fields(PUBLISHED[name][0], "config.json")
    model = Model.model_validate({"seq_length": 8, **fields})
    written = config_of(model, fields["vocab_size"], "bfloat16", {"bos_token_id": 2, "eos_token_id": 2})
    assert written.get("n_ctx") == written.get("n_positions")  # llama.cpp reads the first one
    again = Model.model_validate({"seq_length": 8, **model_fields(written, "config.json")})
    assert {field: again.value_of(field) for field in fields} == {field: model.value_of(field) for field in fields}
    theirs = transformers.AutoConfig.for_model(**written).to_dict()
    of_theirs = Model.model_validate({"seq_length": 8, **model_fields({**written, **theirs}, "config.json")})
    assert {field: of_theirs.value_of(field) for field in fields} == {field: model.value_of(field) for field in fields}


def refused(kind: str, **more: Any) -> list[str]:
    config = next(config for config, _ in PUBLISHED.values() if config["model_type"] == kind)
    given = {name: value for name, value in (config | more).items() if value is not ...}
    with pytest.raises(RequestError) as error:
        model_fields(given, "c")
    return [str(problem) for problem in error.value.problems]


UNKNOWN = "is not a key that is known"
REMOVE = "use a model without it, or remove it from config.json if no weight and no logit depends on it"


def test_keys_that_are_not_known_are_refused_by_name_all_at_once() -> None:
    assert refused("llama", logit_scale=0.5, final_logit_softcapping=None, hidden_act="relu") == [
        'c: hidden_act: is not supported; got "relu"; use a model that has "silu"',
        f"c: logit_scale: {UNKNOWN}; got 0.5; {REMOVE}",
        f"c: final_logit_softcapping: {UNKNOWN}; got null; {REMOVE}",
    ]
    assert refused("gpt2", rope_scaling=None, n_embd=...) == [
        f"c: rope_scaling: {UNKNOWN}; got null; {REMOVE}",
        "c: describes no model; got no n_embd; download it again: transformers' save_pretrained writes it",
    ]


def test_a_missing_key_has_the_default_of_transformers_or_is_named() -> None:
    describes = "describes no model; got no {}; download it again: transformers' save_pretrained writes it"
    assert refused("mistral", sliding_window=..., model_type=...) == [
        f"c: {describes.format('model_type, no sliding_window')}"
    ]
    for kind, length in (("llama", 2048), ("qwen2", 32768), ("mixtral", 131072)):
        config = next(config for config, _ in PUBLISHED.values() if config["model_type"] == kind)
        without = {key: value for key, value in config.items() if key != "max_position_embeddings"}
        assert model_fields(without, "c")["max_position_embeddings"] == length


def test_a_base_of_rotations_may_have_a_fraction() -> None:
    config, _ = PUBLISHED["llama 3.1 8b"]
    fields = model_fields({**config, "rope_theta": 500000.5}, "c")
    assert fields["rotary_base"] == 500000.5
    assert config_of(Model.model_validate({"seq_length": 8, **fields}), 9, "", None)["rope_theta"] == 500000.5


def test_a_model_type_that_contradicts_architectures_is_named() -> None:
    assert refused("llama", model_type="mistral") == [
        'c: model_type: contradicts architectures; got "mistral"; use a model that has "llama"'
    ]


OTHER_VALUES: list[tuple[str, str, Any]] = [
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "add_cross_attention", True),
    ("gpt2", "activation_function", "relu"),
    ("gpt2", "tie_word_embeddings", 1),
    ("gpt2", "tie_word_embeddings", "false"),
    ("gpt2", "tie_word_embeddings", None),
    ("gpt2", "n_layer", "12"),
    ("gpt2", "n_layer", True),
    ("gpt2", "n_layer", 12.5),
    ("gpt2", "n_layer", 10**400),
    ("gpt2", "layer_norm_epsilon", "1e-5"),
    ("gpt2", "layer_norm_epsilon", float("nan")),
    ("gpt2", "layer_norm_epsilon", 10**400),
    ("llama", "num_attention_heads", 0),
    ("qwen2", "attention_bias", True),
    ("llama", "attention_bias", 0),
    ("llama", "attention_bias", None),
    ("llama", "mlp_bias", True),
    ("llama", "rope_interleaved", True),
    ("llama", "rope_theta", "500000"),
    ("llama", "rope_theta", -1.0),
    ("llama", "rope_theta", 10**400),
    ("llama", "num_hidden_layers", 32.0),
    ("llama", "rms_norm_eps", 1),
    ("llama", "head_dim", 0),
    ("llama", "head_dim", 63),
    ("llama", "num_key_value_heads", 7),
    ("qwen2", "head_dim", 64),
    ("qwen2", "layer_types", ["full_attention"]),
    ("mixtral", "num_experts_per_tok", 9),
    ("llama", "quantization_config", {"quant_method": "fp8"}),
    ("llama", "auto_map", {"AutoModelForCausalLM": "modeling_own.Own"}),
    ("llama", "pruned_heads", {"0": [1]}),
    ("llama", "is_encoder_decoder", True),
    ("llama", "model_type", "mistral"),
    ("llama", "model_type", None),
    ("llama", "architectures", "LlamaForCausalLM"),
    ("llama", "architectures", ["LlamaForCausalLM", None]),
    ("llama", "auto_map", None),
    ("mistral", "sliding_window", 4096),
    ("granite", "logits_scaling", 0),
    ("smollm3", "no_rope_layers", [1] * 36),
    ("smollm3", "no_rope_layers", [1, 1, 1, 0] * 8),
    ("smollm3", "no_rope_layers", 4),
    ("granite", "attention_multiplier", None),
    ("phi3", "sliding_window", 2047),
    ("phi3", "partial_rotary_factor", 0.75),
    ("llama", "architectures", ["LlamaForCausalLM", "OwnForCausalLM"]),
    ("qwen2", "use_sliding_window", True),
    ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen2", "layer_types", []),
    ("qwen3", "head_dim", None),
    ("qwen2_moe", "qkv_bias", False),
    ("qwen2_moe", "decoder_sparse_step", 2),
    ("qwen3_moe", "mlp_only_layers", [0]),
    ("mixtral", "sliding_window", 4096),
    ("mixtral", "router_jitter_noise", 0.1),
]


@pytest.mark.parametrize(
    ("kind", "key", "value"), OTHER_VALUES, ids=[f"{it[0]}-{it[1]}-{n}" for n, it in enumerate(OTHER_VALUES)]
)
def test_other_values_and_types_are_refused(kind: str, key: str, value: Any) -> None:
    (problem,) = refused(kind, **{key: value})
    assert problem.startswith(f"c: {key}: ")


def test_rotations_are_read_key_by_key() -> None:
    def of_rope(**them: Any) -> list[str]:
        return refused("llama", rope_scaling={**STRETCH, "rope_type": "llama3", **them})

    assert of_rope(attention_factor=2.0) == [f"c: rope_scaling.attention_factor: {UNKNOWN}; got 2.0; {REMOVE}"]
    assert of_rope(low_freq_factor=2.0) == [
        "c: rope_scaling.low_freq_factor: is not supported; got 2.0; use a model that has 1.0"
    ]
    assert of_rope(rope_theta=10000) == [
        "c: rope_theta: contradicts another key; got 500000.0; keep one of the keys that say rotary_base"
    ]
    assert of_rope(type="linear")[0].startswith("c: rope_scaling.type: is not supported")
    assert of_rope(rope_type="longrope")[0].startswith('c: rope_scaling.rope_type: is not supported; got "longrope"')
    assert of_rope(rope_type=["yarn"])[0].startswith('c: rope_scaling.rope_type: is not supported; got ["yarn"]')
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_slow": 2, "mscale": 0.7}
    assert refused("llama", rope_scaling=yarn) == [
        "c: rope_scaling.beta_slow: is not supported; got 2; use a model that has 1.0",
        "c: rope_scaling.mscale: is not supported; got 0.7; use a model that has null",
        "c: describes no model; got no original_max_position_embeddings;"
        " download it again: transformers' save_pretrained writes it",
    ]
    assert refused("llama", rope_scaling={"rope_type": "llama3", "low_freq_factor": 1.0}) == [
        "c: describes no model; got no factor, no high_freq_factor, no original_max_position_embeddings;"
        " download it again: transformers' save_pretrained writes it"
    ]
    longrope = {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
    for rope in ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, longrope):
        got = f'got "{rope["type"]}"; use a model that has "default"'
        assert refused("phi3", rope_scaling=rope) == [f"c: rope_scaling.type: is not supported; {got}"]
    assert refused("llama", rope_scaling=8)[0].startswith("c: rope_scaling: is not supported; got 8; ")
    assert refused("llama", rope_scaling={"type": "default", "factor": 4.0}) == [
        f"c: rope_scaling.factor: {UNKNOWN}; got 4.0; {REMOVE}"
    ]
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    wanted = 'c: rope_scaling.rope_type: is not supported; got "llama3"; use a model that has "default"'
    assert wanted in refused("llama", **both)
    own, _ = PUBLISHED["smollm2 135m"]
    fields = model_fields({**own, "rope_theta": 100000.0, "rope_parameters": {"rope_type": "default"}}, "c")
    assert (fields["rotary_base"], fields["use_rope_scaling"]) == (100000, False)
