"""Folders of transformers': written and read without a difference, and with the same logits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exact_logits import exact_logits
from tests.experiments import with_fields
from tridock.contracts.checkpoint_files import Entry, Manifest
from tridock.contracts.tokenizers import sha256s_in
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.engines.progress import PROGRESS, Progress
from tridock.errors import RequestError, RunError
from tridock.experiment import dump_experiment
from tridock.experiment.families import family_of
from tridock.experiment.model import Model
from tridock.experiment.transformers_config import config_of, model_fields
from tridock.train.huggingface import export as export_program
from tridock.train.huggingface.export import export
from tridock.train.huggingface.saved import Saved, _gpt2_files
from tridock.train.huggingface.weights import Pretrained, exported, names_of
from tridock.train.models.gpt import GPT, Shape

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
    "llama-linear": {**LLAMA, "use_rope_scaling": True, "rope_scaling_type": "linear", "rope_scaling_factor": 2.5},
    "llama-yarn": {
        **LLAMA,
        "use_rope_scaling": True,
        "rope_scaling_type": "yarn",
        "original_max_position_embeddings": 8,
    },
    "llama-biases": {**LLAMA, "add_attention_bias": True},
    "llama-untied": {**LLAMA, **UNTIED, "kv_channels": 16},
    "qwen2": {**LLAMA, "add_qkv_bias": True},
    "qwen3": {**LLAMA, **UNTIED, "qk_layernorm": True, "kv_channels": 12},
    "olmo2": {**LLAMA, **UNTIED, "qk_layernorm": True, "qk_layernorm_all_heads": True, "use_post_norm": True},
    "granite": {
        **LLAMA,
        **UNTIED,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 0.5,
    },
    "granite-without-its-scores": {**LLAMA, "residual_multiplier": 0.5},
    "smollm3": {**LLAMA, "no_rope_freq": 2},
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
    "mixtral-of-one": {**LLAMA, **UNTIED, "num_moe_experts": 4, "moe_router_topk": 1},
    "qwen3-moe-of-one": {
        **LLAMA,
        **UNTIED,
        "qk_layernorm": True,
        "num_moe_experts": 4,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
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


def experiment(load: str | None = None, **model: Any) -> Any:
    base = {
        "name": "x",
        "model": model,
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "x"},
        "train": {"train_iters": 1, "load": load},
    }
    return with_fields(base, {})


def test_transformers_has_the_same_logits(gpt: GPT, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written(gpt, tmp_path), dtype=torch.float32)
    tokens = torch.randint(TOKENS, (2, 16))
    with torch.no_grad():
        found, wanted = gpt(tokens)[..., :TOKENS].double(), exact_logits(theirs, tokens)
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
        f"model.rotary_base: the model in {folder} has 500000.0; got 10000.0; set it to 500000.0",
        f"model.vocab_size: the model in {folder} has 50; got 60; set it to 50",
    ]
    experts = {"untie_embeddings_and_output_weights": True, "num_moe_experts": 4}
    with pytest.raises(RequestError, match=r"model.num_moe_experts: the model in .* has null; got 4; set it to null"):
        Pretrained.of(folder, experiment(**LLAMA, **experts), TOKENS)
    Pretrained.of(folder, experiment(**{**LLAMA, "seq_length": 8}), TOKENS)  # shorter samples need no table


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        model_fields({"architectures": ["MambaForCausalLM"]}, "m/config.json")
    assert str(error.value) == (
        "m/config.json: is of an architecture that is not supported; got MambaForCausalLM;"
        " use one of GPT2LMHeadModel, LlamaForCausalLM, GraniteForCausalLM, MistralForCausalLM, Olmo2ForCausalLM,"
        " Phi3ForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM, MixtralForCausalLM,"
        " Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, or train it with TRL: tridock init --recipe sft"
    )
    with pytest.raises(RequestError, match=r"^model.rotary_percent: has no counterpart in transformers; got 0.5; "):
        family_of(Model.model_validate({**LLAMA, "rotary_percent": 0.5}))
    shared = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 24}
    with pytest.raises(
        RequestError, match=r"^model.moe_shared_expert_intermediate_size: has no counterpart .* got 24; "
    ):
        family_of(Model.model_validate({**LLAMA, "untie_embeddings_and_output_weights": True, **shared}))
    config = config_of(Model.model_validate(LLAMA), TOKENS, "float32", None)
    with pytest.raises(
        RequestError, match=r'^c: hidden_act: is not supported; got "relu"; use a model that has "silu"$'
    ):
        model_fields({**config, "hidden_act": "relu"}, "c")
    with pytest.raises(RequestError, match=r": holds no config.json; name a folder"):
        Pretrained.of(tmp_path, experiment(**LLAMA), TOKENS)


def run_of(folder: Path, gpt: GPT, load: str | None = None) -> Path:
    """A run of engine torch that has saved these weights."""
    run = folder / "runs" / "r"
    checkpoint = run / "checkpoints" / "iter_0000003"
    checkpoint.mkdir(parents=True)
    fields = {**gpt.shape.model.model_dump(exclude_unset=True), "vocab_size": TOKENS}
    given = experiment(load, **fields)
    (run / "experiment.yaml").write_text(dump_experiment(given))
    torch.save({"model": gpt.state_dict()}, checkpoint / "ddp.pt")
    (checkpoint / PROGRESS).write_bytes(Progress.of(given, 1, TOKENS).to_bytes())
    entries = {file.name: Entry.of(file) for file in checkpoint.iterdir()}
    (checkpoint / "files.json").write_bytes(Manifest(entries).to_bytes())
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


def test_an_export_has_the_tokenizer_that_its_data_were_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the checkpoint says, whatever data lie there now; another one that is named gives a warning."""
    run = run_of(tmp_path, GPT(Shape.of(Model.model_validate(LLAMA), TOKENS)))
    progress = run / "checkpoints" / "iter_0000003" / PROGRESS
    made, other = (BytePairTokenizer.train([text], vocab_size=270) for text in ("a line", "another text"))
    made.save(tmp_path / "tokenizer")  # beside the data, whose path is x
    other.save(tmp_path / "other")
    content = json.dumps(json.loads(progress.read_text()) | {"tokenizer_sha256": made.sha256}).encode()
    progress.write_bytes(content)
    entries = {file.name: Entry.of(file) for file in progress.parent.iterdir() if file.name != "files.json"}
    (progress.parent / "files.json").write_bytes(Manifest(entries).to_bytes())
    export(run, tmp_path / "a", quiet=True)
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (tmp_path / "tokenizer/tokenizer.json").read_text()
    assert capsys.readouterr().err == ""
    (tmp_path / "other" / "special_tokens_map.json").write_text('{"eos_token": "!"}')
    export(run, tmp_path / "b", tokenizer=tmp_path / "other", quiet=True)
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["eos_token"] == "!"
    assert capsys.readouterr().err == (
        f"warning: --tokenizer: is not the tokenizer that made the data, whose sha256 is {made.sha256}; got "
        f"{tmp_path / 'other'} with {sha256s_in(tmp_path / 'other')[0]}; "
        "leave the option out, if ids mean something else there\n"
    )


def test_a_fetched_run_has_its_checkpoint_and_vocabulary_in_its_own_folder(tmp_path: Path) -> None:
    """Wherever the experiment says that they are on the hosts."""
    gpt = GPT(Shape.of(Model.model_validate(LLAMA), TOKENS))
    run = run_of(tmp_path, gpt)
    fields = {**gpt.shape.model.model_dump(exclude_unset=True), "vocab_size": TOKENS}
    names = {"data.vocab_file": "gpt2/v.json", "data.merge_file": "gpt2/m.txt"}
    dumped = experiment(**fields).model_dump(exclude_unset=True)
    elsewhere = with_fields(dumped, {"train.checkpoint_folder": "/mnt/ckpt", **names})
    (run / "experiment.yaml").write_text(dump_experiment(elsewhere))
    assert Saved.open(run).description.startswith(f"{run}/checkpoints/iter_0000003, ")
    fetched = run / "tokenizer"
    assert _gpt2_files(elsewhere, tmp_path, fetched) == (fetched / "v.json", fetched / "m.txt")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/v.json").touch()
    assert _gpt2_files(elsewhere, tmp_path, fetched) == (tmp_path / "gpt2/v.json", fetched / "m.txt")


def test_an_export_from_scratch_says_what_its_tokenizer_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = run_of(tmp_path, GPT(Shape.of(Model.model_validate({**LLAMA, **UNTIED}), TOKENS)))
    BytePairTokenizer.train(["a line"], vocab_size=270).save(tmp_path / "t")  # <|endoftext|> is token 0
    added = [{"id": 1, "content": "!", "special": True}, {"id": 2, "content": '"', "special": True}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    (tmp_path / "t/generation_config.json").write_text('{"eos_token_id": 9, "temperature": 0.1}')  # of another model
    for number, (declared, begin, end) in enumerate(
        [(None, 0, 0), ({"eos_token": "!"}, None, 1), ({"bos_token": "!", "eos_token": '"'}, 1, 2)]
    ):
        if declared is not None:
            text = json.loads((tmp_path / "t/tokenizer.json").read_text())
            text["added_tokens"] = [*text["added_tokens"][:1], *({**it, **flags} for it in added)]
            (tmp_path / "t/tokenizer.json").write_text(json.dumps(text))
            (tmp_path / "t/special_tokens_map.json").write_text(json.dumps(declared))
        output = tmp_path / f"out{number}"
        export(run, output, tokenizer=tmp_path / "t", dtype="bfloat16", quiet=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(output)
        tokenizer = transformers.AutoTokenizer.from_pretrained(output)
        wanted = (begin, end)
        assert (model.config.bos_token_id, model.config.eos_token_id) == wanted
        assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == wanted
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == wanted
        assert model.generation_config.temperature is None
        assert model.dtype == torch.bfloat16
        assert model.config.tie_word_embeddings is False


def test_an_export_of_a_fine_tuned_model_generates_as_that_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its folder where the run found it, or only with what fetch brought of it."""
    transformers = pytest.importorskip("transformers")
    gpt = GPT(Shape.of(Model.model_validate({**LLAMA, **UNTIED}), TOKENS))
    run, origin, output = run_of(tmp_path, gpt, "hf:models/m"), tmp_path / "models/m", tmp_path / "out"
    origin.mkdir(parents=True)
    BytePairTokenizer.train(["a line"], vocab_size=270).save(origin)
    config = json.loads((written(gpt, origin) / "config.json").read_text())
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}
    (origin / "config.json").write_text(json.dumps(config | ids))
    generates = {"bos_token_id": 1, "eos_token_id": [2, 3, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (origin / "generation_config.json").write_text(json.dumps(generates))
    (origin / "chat_template.jinja").write_text("{% for it in messages %}<{{ it.content }}>{% endfor %}")
    (origin / "additional_chat_templates").mkdir()
    (origin / "additional_chat_templates/tools.jinja").write_text("x")
    for there in (origin, run / "tokenizer"):
        export(run, output, quiet=True)
        assert capsys.readouterr().out.count("no tokenizer") == 0
        found = json.loads((output / "config.json").read_text())
        assert {name: found[name] for name in ids} == ids
        assert json.loads((output / "generation_config.json").read_text()) == generates
        model = transformers.AutoModelForCausalLM.from_pretrained(output)
        assert model.generation_config.eos_token_id == [2, 3, 5]
        own, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (output, there))
        assert own.chat_template == theirs.chat_template
        assert own.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<a>"
        assert own.get_chat_template("tools") == "x"
        assert [file.name for file in (output / "additional_chat_templates").iterdir()] == ["tools.jinja"]
        shutil.rmtree(output)
        if there == origin:
            origin.rename(run / "tokenizer")
    (run / "tokenizer/generation_config.json").unlink()  # older folders have it in config.json
    (run / "tokenizer/config.json").write_text(json.dumps(config | generates | {"pad_token_id": 4}))
    export(run, output, quiet=True)
    assert json.loads((output / "generation_config.json").read_text()) == generates | {"pad_token_id": 4}
    assert transformers.GenerationConfig.from_pretrained(output).eos_token_id == [2, 3, 5]


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
