"""Folders of transformers': written and read without a difference, and with the same logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments import with_fields
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import RequestError, RunError
from tridock.experiment import dump_experiment
from tridock.experiment.families import config_of, family_of, model_fields
from tridock.experiment.model import Model
from tridock.train.checkpoints.files import Entry, manifest_bytes
from tridock.train.checkpoints.progress import PROGRESS, Progress
from tridock.train.huggingface import export as export_program
from tridock.train.huggingface.export import export
from tridock.train.huggingface.generate import built, sampled
from tridock.train.huggingface.saved import Saved
from tridock.train.huggingface.weights import Pretrained, exported, names_of
from tridock.train.models.gpt import GPT, Shape
from tridock.train.rank.process_group import Ranks

TOKENS = 50
GPT2: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "make_vocab_size_divisible_by": 16,
}  # fmt: skip
LLAMA = {
    **GPT2, "num_query_groups": 2, "ffn_hidden_size": 48, "normalization": "RMSNorm", "norm_epsilon": 1e-6,
    "position_embedding_type": "rope", "rotary_base": 500000, "swiglu": True, "add_bias_linear": False,
}  # fmt: skip
UNTIED = {"untie_embeddings_and_output_weights": True}
KINDS = {
    "gpt2": GPT2,
    "gpt2-exact-gelu": {**GPT2, "activation_func": "gelu"},
    "llama": {**LLAMA, "use_rope_scaling": True, "rope_scaling_factor": 32.0},
    "llama-untied": {**LLAMA, **UNTIED, "kv_channels": 16},
    "qwen2": {**LLAMA, "add_qkv_bias": True},
    "qwen3": {**LLAMA, **UNTIED, "qk_layernorm": True, "kv_channels": 12},
    "mixtral": {**LLAMA, **UNTIED, "num_moe_experts": 4},
    "qwen2-moe": {
        **LLAMA,
        **UNTIED,
        "add_qkv_bias": True,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
    },
    "qwen3-moe": {
        **LLAMA,
        **UNTIED,
        "qk_layernorm": True,
        "kv_channels": 12,
        "num_moe_experts": 4,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 24,
    },
}


@pytest.fixture(params=KINDS)
def gpt(request: pytest.FixtureRequest) -> GPT:
    torch.manual_seed(1)
    model = GPT(Shape.of(Model.model_validate(KINDS[request.param]), TOKENS)).eval()
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms, too
            weight += 0.2 * torch.randn_like(weight)
    return model


def written(gpt: GPT, folder: Path, rows: int = TOKENS) -> Path:
    from safetensors.torch import save_file

    weights = dict(gpt.named_parameters())
    tensors = {name: it.detach().clone() for name, it in exported(gpt.shape.model, rows, weights.__getitem__)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(gpt.shape.model, rows, "float32", None)))
    return folder


@pytest.mark.parametrize("gpt", ["gpt2", "qwen3", "mixtral"], indirect=True)
def test_text_is_the_one_of_transformers(gpt: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    tokenizer = BytePairTokenizer.train(["a line of text\n" * 20, "another text\n"], vocab_size=280)
    wide = GPT(Shape.of(gpt.shape.model.model_copy(update={"vocab_size": 280}), 280)).eval()
    folder = written(wide, tmp_path, 280)
    tokenizer.save(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.encode("another text")
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=tokenizer.end_of_text,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
    saved = Saved.open(folder)
    found = sampled(built(saved, torch.device("cpu")), saved.tokens, prompt, 0.0, 0, 279)
    assert [next(found) for _ in wanted] == wanted


def experiment(**model: Any) -> Any:
    base = {
        "name": "x",
        "model": model,
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "x"},
        "train": {"train_iters": 1},
    }
    return with_fields(base, {})


def test_transformers_has_the_same_logits(gpt: GPT, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written(gpt, tmp_path), dtype=torch.float32)
    tokens = torch.randint(TOKENS, (2, 16))
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, gpt(tokens)[..., :TOKENS]
    assert found.std() > 0.5
    assert torch.allclose(found, wanted, atol=1e-5, rtol=0)
    config = json.loads(theirs.config.to_json_string())
    again = model_fields(config, "config.json")
    assert again == model_fields(json.loads((tmp_path / "config.json").read_text()), "config.json")


def test_the_weights_come_back_bit_for_bit(gpt: GPT, tmp_path: Path) -> None:
    model = gpt.shape.model
    read = Pretrained.of(written(gpt, tmp_path), experiment(**model.model_dump(exclude_unset=True)), TOKENS)
    found = dict(read.items())
    own = dict(gpt.named_parameters())
    assert found.keys() == own.keys() == set(names_of(model))
    for name, weight in own.items():
        rows = TOKENS if name in ("token_embedding.weight", "output_layer.weight") else len(weight)
        assert torch.equal(found[name], weight[:rows]), name


def test_every_difference_from_the_experiment_is_named(tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = written(GPT(Shape.of(Model.model_validate(LLAMA), TOKENS)), tmp_path)
    with pytest.raises(RequestError) as error:
        Pretrained.of(folder, experiment(**{**LLAMA, "num_query_groups": 4, "rotary_base": 10000}), 60)
    assert [str(problem) for problem in error.value.problems] == [
        f"model.num_query_groups: the model in {folder} has 2; got 4; set it to 2",
        f"model.rotary_base: the model in {folder} has 500000; got 10000; set it to 500000",
        f"model.vocab_size: the model in {folder} has 50; got 60; set it to 50",
    ]
    experts = {"untie_embeddings_and_output_weights": True, "num_moe_experts": 4}
    with pytest.raises(RequestError, match=r"model.num_moe_experts: the model in .* has None; got 4; set it to null"):
        Pretrained.of(folder, experiment(**LLAMA, **experts), TOKENS)
    Pretrained.of(folder, experiment(**{**LLAMA, "seq_length": 8}), TOKENS)  # shorter samples need no table


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        model_fields({"architectures": ["MambaForCausalLM"]}, "m/config.json")
    assert str(error.value) == (
        "m/config.json: is of an architecture that is not supported; got MambaForCausalLM;"
        " use one of GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,"
        " MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM"
    )
    with pytest.raises(RequestError, match=r"^model.rotary_percent: has no counterpart in transformers; got 0.5; "):
        family_of(Model.model_validate({**LLAMA, "rotary_percent": 0.5}))
    shared = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 24}
    with pytest.raises(
        RequestError, match=r"^model.moe_shared_expert_intermediate_size: has no counterpart .* got 24; "
    ):
        family_of(Model.model_validate({**LLAMA, "untie_embeddings_and_output_weights": True, **shared}))
    config = config_of(Model.model_validate(LLAMA), TOKENS, "float32", None)
    with pytest.raises(RequestError, match=r"^c: hidden_act: is not supported; got relu; use a model that has silu$"):
        model_fields({**config, "hidden_act": "relu"}, "c")
    with pytest.raises(
        RequestError, match=r"config.json: cannot be read; got No such file or directory; name a folder"
    ):
        Pretrained.of(tmp_path, experiment(**LLAMA), TOKENS)


def run_of(folder: Path, gpt: GPT) -> Path:
    """A run of engine torch that has saved these weights."""
    run = folder / "runs" / "r"
    checkpoint = run / "checkpoints" / "iter_0000003"
    checkpoint.mkdir(parents=True)
    fields = {**gpt.shape.model.model_dump(exclude_unset=True), "vocab_size": TOKENS}
    given = experiment(**fields)
    (run / "experiment.yaml").write_text(dump_experiment(given))
    torch.save({"model": gpt.state_dict()}, checkpoint / "ddp.pt")
    (checkpoint / PROGRESS).write_bytes(Progress.of(given, Ranks(0, 0, 1, torch.device("cpu")), TOKENS, 64).to_bytes())
    entries = {file.name: Entry.of(file) for file in checkpoint.iterdir()}
    (checkpoint / "files.json").write_bytes(manifest_bytes(3, entries))
    return run


def test_an_export_says_how_far_it_is_unless_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tridock.progress.LINE_S", -1.0)
    run = run_of(tmp_path, GPT(Shape.of(Model.model_validate(LLAMA), TOKENS)))
    export(run, tmp_path / "a")
    *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"export: ([\d,]+) of \1 parameters after \d+ s", last)
    export(run, tmp_path / "b", quiet=True)
    assert capsys.readouterr().err == ""


def test_an_export_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    gpt = GPT(Shape.of(Model.model_validate(LLAMA), TOKENS))
    run, output = run_of(tmp_path, gpt), tmp_path / "out"
    monkeypatch.setattr(export_program, "FILE_BYTES", 8000)
    export(run, output, dtype="bfloat16")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    found = dict(Pretrained.of(output, experiment(**LLAMA), TOKENS).items())
    own = dict(gpt.named_parameters())
    assert all(torch.equal(found[name], own[name][: len(found[name])].bfloat16()) for name in own)
    with pytest.raises(RequestError, match="-o: exists"):
        export(run, output)
    with pytest.raises(RequestError, match=r"--iteration: has no checkpoint in .*; got 7; there: 3$"):
        export(run, tmp_path / "other", iteration=7)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_program, "save_file", full)
    with pytest.raises(RunError, match="the weights could not be written; got No space left on device"):
        export(run, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]
    (run / "checkpoints/iter_0000003/ddp.pt").write_bytes(b"x")
    with pytest.raises(RequestError, match=r"ddp.pt: is cut short"):
        export(run, tmp_path / "other")


SCALING = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {**SCALING, "original_max_position_embeddings": 8192}, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 576,
        "intermediate_size": 1536, "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
}  # fmt: skip
"""config.json on Hugging Face, what says something of the model."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_the_published_model(preset: str) -> None:
    theirs = Model.model_validate({"seq_length": 8, **model_fields(PUBLISHED[preset], "config.json")})
    own = Model.model_validate({"preset": preset, "seq_length": 8, "kv_channels": theirs.kv_channels})
    other = {"preset": None, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    if own.num_moe_experts:
        assert (own.expert_size, own.moe_aux_loss_coeff) == (14336, PUBLISHED[preset]["router_aux_loss_coef"])
        other |= {"ffn_hidden_size": None, "moe_ffn_hidden_size": 14336, "moe_aux_loss_coeff": 0.0}
    assert own.model_copy(update=other) == theirs
