"""What a folder of weights holds is used or refused, before a rank starts: each key of ``config.json``, each weight."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.train.megatron_checkpoints import ARGS, FIELDS, nested, plain, shards
from tests.unit.train.pretrained_models import before_and_in_ranks, gpt_of, loaded, names_and_weights, preflight
from tests.unit.train.test_huggingface import GPT2, LLAMA, TOKENS, UNTIED
from tests.unit.train.test_pretrained import zero_checkpoint
from tests.unit.train.test_pretrained_transformers import DESCRIBED
from tridock.cli import main
from tridock.data.corpus import prepare_demo
from tridock.errors import RequestError
from tridock.node.probes.pretrained import stored_weights
from tridock.train.huggingface.generate import built
from tridock.train.huggingface.saved import Saved

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "tie_word_embeddings": True,
}  # fmt: skip
OF_GPT2: dict[str, Any] = {
    "vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def written(folder: Path, name: str = "Llama", **fields: Any) -> tuple[Path, Any]:
    """A folder that transformers' ``save_pretrained`` writes, and its model, whose logits differ by more than 1."""
    config = getattr(transformers, f"{name}Config")(**{**(OF_GPT2 if name == "GPT2" else SIZES), **fields})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return folder, model


def edited(folder: Path, config: Mapping[str, Any] = {}, without: tuple[str, ...] = (), **more: Any) -> Path:
    """The folder with other keys in its ``config.json``, and more weights."""
    change_weights(folder, lambda weights: weights | more)
    path = folder / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(kept | dict(config)))
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def everywhere(folder: Path, fields: Mapping[str, Any] = LLAMA) -> str:
    """What is said before a rank starts, by the ranks, and by ``tridock generate``."""
    with pytest.raises(RequestError) as error:
        Saved.open(folder)
    found = before_and_in_ranks(folder, fields, "hf")
    assert found == str(error.value).replace(f"{folder}/", "").replace(str(folder), "DIR")
    return found


def assert_same_logits(folder: Path, fields: Mapping[str, Any], theirs: Any) -> None:
    assert preflight(folder, fields, "hf") == []
    assert loaded(folder, fields, "hf")
    own = built(Saved.open(folder), torch.device("cpu"))
    tokens = torch.randint(TOKENS, (2, 16))
    with torch.no_grad():
        # In fp64: transformers' fp32 has been 1e-4 off, once, in the first forward pass of a process.
        found, wanted = own(tokens)[..., :TOKENS].double(), theirs.double()(tokens).logits
    assert wanted.std() > 0.5
    assert torch.allclose(found, wanted, atol=1e-5, rtol=0)


def test_an_output_layer_of_gpt2_is_used(tmp_path: Path) -> None:
    folder, theirs = written(tmp_path, "GPT2", tie_word_embeddings=False)
    assert before_and_in_ranks(folder, GPT2, "hf") == (
        "model.untie_embeddings_and_output_weights: the model in DIR has true; got false; set it to true"
    )
    assert_same_logits(folder, {**GPT2, **UNTIED}, theirs)


ODD = "train.load: DIR holds weights that the experiment's model lacks; got"
OTHER = "train.load: DIR has weights in a format that is not read; got"
SAVE = "save it in fp32, bf16 or fp16"


def test_weights_in_fp8_are_refused(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    scaled = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in (0, 1) for name in ("down", "gate", "up")]
    change_weights(folder, lambda it: it | {name: it[name].to(torch.float8_e4m3fn) for name in scaled})
    edited(folder, **{f"{name}_scale_inv": torch.ones(1, 1) for name in scaled})
    of_weights = (
        f"{OTHER} model.layers.0.mlp.up_proj.weight in F8_E4M3,"
        " model.layers.0.mlp.gate_proj.weight in F8_E4M3, model.layers.0.mlp.down_proj.weight in F8_E4M3,"
        " model.layers.1.mlp.up_proj.weight in F8_E4M3, model.layers.1.mlp.gate_proj.weight in F8_E4M3 and 1 more;"
        f" {SAVE}\n"
        f"{ODD} model.layers.0.mlp.down_proj.weight_scale_inv, model.layers.0.mlp.gate_proj.weight_scale_inv,"
        " model.layers.0.mlp.up_proj.weight_scale_inv, model.layers.1.mlp.down_proj.weight_scale_inv,"
        f" model.layers.1.mlp.gate_proj.weight_scale_inv and 1 more; {DESCRIBED}"
    )
    assert everywhere(folder) == of_weights
    edited(folder, {"quantization_config": {"quant_method": "fp8"}})
    assert everywhere(folder) == (
        'config.json: quantization_config: is not supported; got {"quant_method": "fp8"}; use a model that has null'
    )


def test_weights_in_int8_are_refused(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(folder, lambda it: it | {name: it[name].to(torch.int8)})
    assert everywhere(edited(folder, **{name.replace("weight", "SCB"): torch.ones(32)})) == (
        f"{OTHER} {name} in I8; {SAVE}\n{ODD} model.layers.0.self_attn.q_proj.SCB; {DESCRIBED}"
    )


def test_layers_biases_norms_and_adapters_that_the_config_lacks_are_refused(tmp_path: Path) -> None:
    third, _ = written(tmp_path / "third", num_hidden_layers=3)
    names = ("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm")
    assert everywhere(edited(third, {"num_hidden_layers": 2})) == (
        f"{ODD} {', '.join(f'model.layers.2.{name}.weight' for name in names)} and 4 more; {DESCRIBED}"
    )
    biases, _ = written(tmp_path / "biases", attention_bias=True)
    assert "; got model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.o_proj.bias, " in everywhere(
        edited(biases, without=("attention_bias",))
    )
    norms, _ = written(tmp_path / "norms", "Qwen3", head_dim=8)
    odd = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
    of_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert "; got model.layers.0.self_attn.k_norm.weight, model.layers.0.self_attn.q_norm.weight, " in everywhere(
        edited(norms, of_llama, without=odd)
    )
    lora = {f"model.layers.0.self_attn.q_proj.lora_{one}.weight": torch.ones(2, 32) for one in "AB"}
    assert everywhere(edited(written(tmp_path / "lora")[0], **lora)) == f"{ODD} {', '.join(lora)}; {DESCRIBED}"


def of_deepspeed(folder: Path, stage: int, **more: Any) -> Path:
    """A checkpoint with these entries in the model beside its weights."""
    folder = zero_checkpoint(folder, names_and_weights(gpt_of(LLAMA)), stage)
    for file in (folder / "global_step7").glob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        state["module"] |= more
        state["buffer_names"] += [name for name in more if name.endswith(("SCB", "scale_inv"))]
        torch.save(state, file)
    return folder


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buffers_and_other_entries_of_deepspeeds_checkpoints_are_known_or_refused(tmp_path: Path, stage: int) -> None:
    names = {it: f"model.layers.0.self_attn.q_proj.{it}" for it in ("SCB", "weight_scale_inv", "_extra_state")}
    scaled = {names["SCB"]: torch.ones(32), names["weight_scale_inv"]: torch.ones(1, 1), names["_extra_state"]: None}
    found = before_and_in_ranks(of_deepspeed(tmp_path / "a", stage, **scaled), LLAMA)
    assert f"lacks; got {names['SCB']}, {names['weight_scale_inv']}; change the model's fields" in found
    known = of_deepspeed(tmp_path / "b", stage, **{names["_extra_state"]: torch.ones(3, dtype=torch.uint8)})
    assert preflight(known, LLAMA) == []
    assert loaded(known, LLAMA)
    other = of_deepspeed(tmp_path / "c", stage, **{"model.layers.0.self_attn.settings": "of another program"})
    assert "lacks; got model.layers.0.self_attn.settings; " in before_and_in_ranks(other, LLAMA)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, torch.uint8])
def test_other_types_in_files_of_torch_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    name, text = "model.layers.0.mlp.up_proj.weight", str(dtype).removeprefix("torch.")
    other = {name: torch.ones(48, 32).to(dtype)}
    found = before_and_in_ranks(of_deepspeed(tmp_path / "a", 0, **other), LLAMA)
    assert found == (f"train.load: global_step7 has weights in a format that is not read; got {name} in {text}; {SAVE}")
    assert preflight(of_deepspeed(tmp_path / "b", 2, **other), LLAMA) == []  # ZeRO's own weights are in fp32
    gpt = gpt_of(FIELDS)
    weights = shards(gpt, 1)[0]
    first = "language_model.transformer.layers.0.mlp.dense_h_to_4h.weight"
    weights[first] = weights[first].to(dtype)
    folder = plain(tmp_path / "c", gpt, 1, model=nested(weights))
    assert both(folder) == (
        f"DIR/iter_0000007: has weights in a format that is not read; got {first} in {text}; convert it with its own"
        " tools, and use hf:DIR"
    )


def both(folder: Path) -> str:
    """What a node and the ranks say of a checkpoint of Megatron-LM."""
    with pytest.raises(RequestError) as error:
        loaded(folder, FIELDS, "megatron")
    assert [stored_weights("megatron", folder).problem] == list(error.value.problems)
    return str(error.value).replace(str(folder), "DIR")


OF_TRAINING = {
    "lr": 1e-4, "lr_decay_style": "cosine", "train_iters": 10, "adam_beta1": 0.9, "clip_grad": 1.0, "DDP_impl": "local",
    "data_path": ["x"], "split": "949,50,1", "seed": 1234, "save": "ck", "log_interval": 1, "tensorboard_dir": None,
    "world_size": 2, "rank": 0, "fp16": True, "hysteresis": 2, "loss_scale": None, "hidden_dropout": 0.1,
    "attention_dropout": 0.1, "init_method_std": 0.02, "attention_softmax_in_fp32": True, "fp8_margin": 0,
    "moe_router_topk": 2, "mamba_state_dim": 128, "kv_lora_rank": 32, "glu_linear_offset": 0.0,
    "softmax_type": "vanilla", "hybrid_mlp_ratio": 0.0, "use_flash_attn": True, "use_distributed_optimizer": True,
    "transformer_impl": "local", "use_legacy_models": True, "rotary_base": 10000, "mscale": 1.0, "num_workers": 2,
    "padded_vocab_size": 64, "encoder_num_layers": 2, "decoder_num_layers": None, "vocab_file": "v", "use_alibi": False,
    "retro_encoder_layers": 2, "num_layers_at_end_in_bf16": 1, "window_size": None, "zero_reduce_scatter": False,
}  # fmt: skip
"""Of v1.1.5 and of later versions, as their checkpoints have them."""


def test_arguments_of_megatron_are_known_or_refused(tmp_path: Path) -> None:
    gpt = gpt_of(FIELDS)
    known = plain(tmp_path / "a", gpt, 2, args=Namespace(**ARGS, **OF_TRAINING))
    assert preflight(known, FIELDS, "megatron") == []
    assert loaded(known, FIELDS, "megatron")
    odd = {"use_alibi": True, "attention_scale": 0.5, "retro_add_retriever": True, "softmax_type": "learnable"}
    assert both(plain(tmp_path / "b", gpt, 2, args=Namespace(**{**ARGS, **OF_TRAINING, **odd}))) == (
        "DIR/iter_0000007: is of a model that is not read: its softmax_type is not vanilla, its use_alibi is not known,"
        " its attention_scale is not known, its retro_add_retriever is not False; got learnable, True, 0.5, True;"
        " convert it with its own tools, and use hf:DIR"
    )


def test_a_model_of_megatron_whose_layers_share_weights_is_refused(tmp_path: Path) -> None:
    shared = {"num_layers": 4, "num_unique_layers": 2, "param_sharing_style": "grouped"}
    folder = plain(tmp_path / "a", gpt_of(FIELDS), 2, args=Namespace(**{**ARGS, **shared, "padded_vocab_size": 128}))
    assert both(folder) == (
        "DIR/iter_0000007: has arguments of other sizes than its weights; got num_layers 4, not 2, padded_vocab_size"
        " 128, not 64; convert it with its own tools, and use hf:DIR"
    )


def test_other_entries_of_megatrons_model_are_known_or_refused(tmp_path: Path) -> None:
    gpt = gpt_of(FIELDS)
    for name, value, wanted in (
        ("language_model.transformer.layers.0.mlp._extra_state", torch.ones(3).byte(), []),
        ("language_model.transformer.layers.0.mlp.settings", "x", ["language_model.transformer.layers.0.mlp.settings"]),
    ):
        weights: dict[str, Any] = {**shards(gpt, 1)[0], name: value}
        folder = plain(tmp_path / name, gpt, 1, model=nested(weights))
        assert [problem.got for problem in preflight(folder, FIELDS, "megatron")] == wanted
        if wanted:
            assert wanted[0] in before_and_in_ranks(folder, FIELDS, "megatron")
        else:
            assert loaded(folder, FIELDS, "megatron")


def test_nothing_starts_from_weights_that_are_not_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model: a layer that its config.json lacks. Of a config.json: a key and a value."""
    monkeypatch.chdir(tmp_path)
    prepare_demo(tmp_path / "data/demo", vocab_size=300, report=lambda _: None, corpus_bytes=30_000)
    written(tmp_path / "third", num_hidden_layers=3, vocab_size=300)
    edited(tmp_path / "third", {"num_hidden_layers": 2})
    written(tmp_path / "keys", vocab_size=300)
    edited(tmp_path / "keys", {"logit_scale": 0.5, "quantization_config": {"quant_method": "fp8"}})
    given = {
        "name": "mine",
        "model": LLAMA,
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/demo/stdlib_text_document"},
        "precision": "fp32",
        "train": {"train_iters": 1},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(given))
    wanted = {
        "third": ["holds weights that the experiment's model lacks; got model.layers.2.input_layernorm.weight"],
        "keys": ["logit_scale: is not a key that is known; got 0.5", "quantization_config: is not supported; got {"],
    }
    for folder, parts in wanted.items():
        assert main(["train", "mine.yaml", "--set", f"train.load=hf:{folder}"]) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mine.yaml: ")]
        assert [part in line for part, line in zip(parts, said, strict=True)] == [True] * len(parts), said
        assert not (tmp_path / "runs").exists()
        with pytest.raises(RequestError):
            Saved.open(tmp_path / folder)
