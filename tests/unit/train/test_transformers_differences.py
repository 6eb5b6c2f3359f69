"""Folders of transformers with one key of config.json changed at random: refused by name, or transformers' logits."""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tridock.errors import RequestError
from tridock.experiment.families import FAMILIES, Family
from tridock.experiment.generation_config import GenerationConfig
from tridock.experiment.parameters import model_parameters
from tridock.experiment.transformers_keys import OfExperiment, WithoutEffect, keys_of
from tridock.train.huggingface.export import export
from tridock.train.huggingface.generate import built, sampled
from tridock.train.huggingface.saved import Saved
from tridock.train.models.gpt import GPT, Shape

transformers = pytest.importorskip("transformers")
FOLDERS: Final = max(120, int(os.environ.get("TRIDOCK_FUZZ", "0")))
TOKENS: Final = 50
STRETCHES: Final[tuple[dict[str, Any], ...]] = (
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
)  # fmt: skip
FOREIGN: Final[dict[str, Any]] = {
    "attention_multiplier": 0.3, "clip_qkv": 0.1, "embedding_multiplier": 2.0,
    "final_logit_softcapping": 30.0, "first_k_dense_replace": 1, "hidden_size": 16,
    "layer_types": ["sliding_attention"],
    "logit_scale": 0.5, "mlp_bias": True, "n_embd": 16, "no_rope_layers": [0], "norm_eps": 0.1, "num_experts": 4,
    "num_hidden_layers": 1, "num_local_experts": 4, "partial_rotary_factor": 0.5, "per_layer_config": {"0": {}},
    "query_pre_attn_scalar": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "sliding_window": 2,
    "tie_last_hidden_states": False,
}  # fmt: skip
"""Keys that another family has, with values that change its logits."""
UNSEEN: Final = (
    "rms_norm_eps", "layer_norm_epsilon", "activation_function", "norm_topk_prob", "num_experts_per_tok",
    "num_attention_heads", "n_head", "num_key_value_heads",
)  # fmt: skip
"""Keys that say what no weight, or no weight alone, shows."""
OF_ROPE: Final = (
    "factor", "partial_rotary_factor", "attention_factor", "type", "rope_theta", "beta_fast", "beta_slow", "truncate",
    "mscale", "mscale_all_dim",
)  # fmt: skip
VALUES: Final = (None, ..., "x", True, False, 0, 1, 2, -1, 0.5, 1.0, 16, [], {}, ["x"])
"""Of any key; ``...`` for none."""


def tiny(family: Family, rng: random.Random) -> Any:
    """A configuration by transformers' own class."""
    kind, heads, head = family.model_type, rng.choice((2, 4)), rng.choice((4, 8))
    own_heads = kind in ("gpt2", "qwen2", "qwen2_moe", "phi3")
    width = heads * head * (1 if own_heads else rng.choice((1, 2)))
    fields: dict[str, Any] = {"vocab_size": TOKENS, "tie_word_embeddings": rng.random() < 0.5}
    if kind == "gpt2":
        fields |= {"n_layer": 2, "n_head": heads, "n_embd": width, "n_positions": 24, "n_inner": rng.choice((None, 40))}
        fields["activation_function"] = rng.choice(("gelu", "gelu_new", "gelu_pytorch_tanh"))
        return transformers.AutoConfig.for_model(kind, **fields)
    fields |= {"num_hidden_layers": 2, "num_attention_heads": heads, "hidden_size": width, "intermediate_size": 40}
    fields |= {"num_key_value_heads": rng.choice((1, 2)), "max_position_embeddings": 64}
    fields |= {"rope_theta": rng.choice((10000.0, 500000, 1234.5)), **({} if own_heads else {"head_dim": head})}
    if hasattr(transformers.AutoConfig.for_model(kind), "attention_bias"):
        fields["attention_bias"] = rng.random() < 0.5
    if rng.random() < 0.5 and kind != "phi3":
        fields["rope_scaling"] = dict(rng.choice(STRETCHES))
    if family.has_experts:
        fields |= {
            "num_experts_per_tok": rng.choice((1, 2)),
            ("num_local_experts" if kind == "mixtral" else "num_experts"): 4,
        }
    if kind.endswith("_moe"):
        fields |= {"moe_intermediate_size": 24, "norm_topk_prob": rng.random() < 0.5}
    fields |= {
        "phi3": {"pad_token_id": 0},
        "granite": {
            "embedding_multiplier": rng.choice((1.0, 3)),
            "residual_multiplier": rng.choice((1.0, 0.5)),
            "attention_multiplier": rng.choice((1.0, 0.2)),
            "logits_scaling": rng.choice((1.0, 2.0)),
        },
        "mistral": {"sliding_window": None},
        "smollm3": {"no_rope_layer_interval": rng.choice((1, 2, 4)), "pad_token_id": 0},
        "qwen2_moe": {"shared_expert_intermediate_size": 20},
    }.get(kind, {})
    return transformers.AutoConfig.for_model(kind, **fields)


def changed(config: dict[str, Any], family: Family, rng: random.Random) -> tuple[dict[str, Any], str, Any, Any]:
    """The configuration with another value of one key; that key, its value before and now."""
    config = copy.deepcopy(config)
    known = keys_of(family)
    idle = [key for key, it in known.items() if isinstance(it, WithoutEffect)]
    unseen = 12 * [key for key in UNSEEN if key in config]
    places = [(config, key) for key in (*sorted(known.keys() - {*idle}), *unseen, *rng.sample(idle, 15), *FOREIGN)]
    ropes = [it for name in ("rope_parameters", "rope_scaling") if isinstance(it := config.get(name), dict)]
    places += [(rope, key) for rope in ropes for key in (*12 * [*rope], *OF_ROPE)]
    while True:
        holder, key = rng.choice(places)
        old, values = holder.get(key, ...), list(VALUES)
        if isinstance(old, bool):
            values += [not old] * 6
        elif isinstance(old, int | float):
            near = (old + 1, old * 2, old - 1, old * 1.37, str(old), float(old), int(old))
            values += [it for it in near if type(it) is not type(old)] + 3 * [
                it for it in near if type(it) is type(old)
            ]
        elif isinstance(old, list):
            values += [[*old, "x"], old * 2]
        elif old is ... and key in FOREIGN:
            values += [FOREIGN[key]] * len(values)
        new = rng.choice(values)
        if json.dumps(str(new)) != json.dumps(str(old)):
            break
    if new is ...:
        del holder[key]
    else:
        holder[key] = new
    return config, key, old, new


@torch.no_grad()
def ours(folder: Path, tokens: Tensor) -> Tensor:
    saved = Saved.open(folder)
    model = GPT(Shape(saved.model, saved.tokens)).eval()
    for name, weight in model.named_parameters():
        weight.copy_(saved.read(name))
    logits: Tensor = model(tokens)
    return logits


@torch.no_grad()
def theirs(folder: Path, tokens: Tensor) -> Tensor | str:
    """The logits of transformers, or why there are none: it raises, or only warns that weights do not fit."""
    try:
        given = {"dtype": torch.float32, "output_loading_info": True}
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
        logits: Tensor = model.eval()(tokens, return_dict=True).logits
    except Exception as error:
        return repr(error)
    return str(info) if any(info.values()) else logits


def is_near(one: Tensor, other: Tensor) -> bool:
    """Whether logits are equal but for float32's rounding, which differs between processors: 2e-5 of the largest."""
    largest = max(1.0, other.abs().max().item())
    return one.shape == other.shape and torch.allclose(one, other, atol=2e-5 * largest, rtol=0)


def saved(family: Family, seed: int, folder: Path) -> Any:
    """A random model of transformers' own class, in a folder."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny(family, random.Random(seed))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES, ids=[family.model_type for family in FAMILIES])
@torch.no_grad()
def test_a_folder_has_its_parameters_its_text_and_its_export(family: Family, tmp_path: Path) -> None:
    for seed in range(4):
        folder, output = tmp_path / f"{seed}", tmp_path / f"{seed}-exported"
        model = saved(family, seed, folder)
        opened = Saved.open(folder)
        assert model_parameters(opened.model, TOKENS) == model.num_parameters()
        tokens = torch.randint(TOKENS, (1, 10))
        config = GenerationConfig(temperature=0.0)
        found = list(islice(sampled(built(opened, torch.device("cpu")), TOKENS, tokens[0].tolist(), config), 8))
        model.generation_config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert found == model.generate(tokens, attention_mask=torch.ones_like(tokens))[0, 10:].tolist()
        export(folder, output, quiet=True)
        again = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        assert is_near(again(tokens).logits, model(tokens).logits)


def outcome(seed: int, folder: Path) -> tuple[str, str]:
    """What happens to the folder of a seed, and what it is."""
    rng, family = random.Random(seed), FAMILIES[seed % len(FAMILIES)]
    model = saved(family, seed, folder)
    tokens = torch.randint(TOKENS, (2, 20))
    before = ours(folder, tokens)
    assert is_near(before, model(tokens).logits)
    config = json.loads((folder / "config.json").read_text())
    config, key, old, new = changed(config, family, rng)
    (folder / "config.json").write_text(json.dumps(config))
    case, wanted = f"{seed}: {family.model_type} {key} from {old!r} to {new!r}", theirs(folder, tokens)
    try:
        found = ours(folder, tokens)
    except RequestError as error:
        is_named = key in str(error) or "weight" in str(error) or (key == "architectures" and key[:-1] in str(error))
        return "refused" if is_named else "refused without a name", f"{case}: {error}"
    if isinstance(wanted, Tensor):
        same = "loaded" if is_near(found, before) else "loaded with other logits"
        return (same if is_near(found, wanted) else "other logits than transformers'"), case
    has_no_effect = isinstance(keys_of(family).get(key), WithoutEffect | OfExperiment) and is_near(found, before)
    return ("without effect" if has_no_effect else "only transformers refuses"), f"{case}: {wanted}"


@pytest.mark.parametrize("folders", [FOLDERS // 6, pytest.param(FOLDERS, marks=pytest.mark.full)])
def test_no_changed_key_makes_a_silent_difference(tmp_path: Path, folders: int) -> None:
    found: dict[str, list[str]] = {}
    for seed in range(folders):
        how, case = outcome(seed, tmp_path / str(seed))
        found.setdefault(how, []).append(case)
    count = Counter({how: len(cases) for how, cases in found.items()})
    fine = ("refused", "loaded", "loaded with other logits", "without effect")
    assert {how: cases for how, cases in found.items() if how not in fine} == {}
    assert count["refused"] >= folders // 5
    assert count["loaded"] >= folders // 10
    assert count["loaded with other logits"] >= folders // 20
