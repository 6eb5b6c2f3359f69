"""The model of an experiment from the config.json of a transformers folder: no size is written twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tridock.cli import main
from tridock.errors import RequestError
from tridock.experiment import Experiment, dump_experiment, parse_experiment
from tridock.experiment.load import parse_recorded
from tridock.experiment.model import Model

REST = """\
name: x
batch: {micro_batch_size: 1}
data: {data_path: data/x}
"""
TRAIN = "train: {train_iters: 1}\n"
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_dropout": 0.2, "head_dim": 128,
    "hidden_size": 1024, "initializer_range": 0.01, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/m in the current folder, with only a config.json."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "models" / "m"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(QWEN))
    return place


def parsed(model: str, *overrides: str, load: str = "") -> Experiment:
    train = f"train: {{train_iters: 1, load: '{load}'}}\n" if load else TRAIN
    return parse_experiment(REST + train + model, "e.yaml", overrides)


def message(model: str, *overrides: str, load: str = "") -> str:
    with pytest.raises(RequestError) as caught:
        parsed(model, *overrides, load=load)
    return str(caught.value)


FROM = "model: {from: 'hf:models/m'}\n"


@pytest.mark.parametrize(
    ("model", "load", "overrides"),
    [
        (FROM, "", ()),
        ("", "hf:models/m", ()),
        ("", "", ("train.load=hf:models/m",)),
        ("", "", ("model.from=hf:models/m",)),
        ("model: {}\n", "hf:models/m", ()),
        ("model: {from: 'hf:models/m', preset: qwen3-0.6b, num_layers: 28, rotary_base: 1000000}\n", "", ()),
        ("model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 4}\n", "",
         ("model.from=hf:models/m", "model.seq_length=40960")),
    ],
)  # fmt: skip
def test_every_size_is_that_of_the_folder(folder: Path, model: str, load: str, overrides: tuple[str, ...]) -> None:
    found = parsed(model, *overrides, load=load).model
    wanted = Model(preset="qwen3-0.6b", seq_length=40960)
    dropout = 0.0 if found.preset else 0.2  # a preset says how it is trained
    own = {"preset": found.preset, "attention_dropout": dropout, "init_method_std": 0.01}
    assert found == wanted.model_copy(update=own)
    assert found.hidden_dropout == 0.0


def test_how_it_is_trained_may_be_written_beside_it(folder: Path) -> None:
    more = "seq_length: 512, attention_dropout: 0.0, hidden_dropout: 0.1, checkpoint_activations: true"
    found = parsed(FROM.replace("}", f", {more}}}")).model
    assert (found.seq_length, found.positions, found.attention_dropout, found.hidden_dropout) == (512, 40960, 0.0, 0.1)
    assert found.checkpoint_activations
    assert parsed("model: {seq_length: 512}\n", load="hf:models/m").model.seq_length == 512


def test_what_disagrees_is_named_with_both_values(folder: Path) -> None:
    assert message(FROM.replace("}", ", num_layers: 30, kv_channels: 64, swiglu: false}")) == (
        "e.yaml: model.num_layers: the model in models/m has 28; got 30; set it to 28\n"
        "e.yaml: model.kv_channels: the model in models/m has 128; got 64; set it to 128\n"
        "e.yaml: model.swiglu: the model in models/m has true; got false; set it to true"
    )
    assert message(FROM.replace("}", ", preset: smollm2-135m}")).splitlines()[:2] == [
        "e.yaml: model.num_layers: the model in models/m has 28; got 30; set it to 28",
        "e.yaml: model.hidden_size: the model in models/m has 1024; got 576; set it to 1024",
    ]
    assert message(FROM, "model.preset=smollm2-135m") == "e.yaml: model.seq_length: is missing; add it"


def test_the_folder_is_not_needed_where_the_model_has_sizes_of_its_own(tmp_path: Path) -> None:
    model = "model: {preset: qwen3-0.6b, seq_length: 8}\n"
    assert parsed(model, load="hf:not/here").model == Model(preset="qwen3-0.6b", seq_length=8)


def test_a_folder_that_says_no_model_is_refused(folder: Path) -> None:
    todo = "copy it to this path, or write the sizes of the model"
    assert message("", load="hf:models/other") == (
        f"e.yaml: train.load: needs config.json of the model here; got no models/other/config.json; {todo}"
    )
    for place in ("models/m", "deepspeed:models/m", "hf:", "7"):
        wanted = "e.yaml: model.from: must be hf:FOLDER; got "
        assert message(f"model: {{from: '{place}'}}\n").startswith(wanted), place
    assert message("", load="deepspeed:models/m") == "e.yaml: model: is missing; add it"
    (folder / "config.json").write_text(json.dumps(QWEN | {"hidden_act": "relu", "logit_scale": 2.0}))
    assert [line.partition("; ")[0] for line in message(FROM).splitlines()] == [
        "models/m/config.json: hidden_act: is not supported",
        "models/m/config.json: logit_scale: is not a key that is known",
    ]
    (folder / "config.json").write_text("[" * 100_000)
    assert message(FROM).startswith("models/m/config.json: cannot be read; got ")
    (folder / "config.json").write_text(json.dumps(QWEN | {"attention_dropout": "much"}))
    assert message(FROM) == ("e.yaml: model.attention_dropout: must be a number; got 'much'; write a number, as in 0.5")


def test_two_dropouts_of_one_model_are_refused(folder: Path) -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.3}
    (folder / "config.json").write_text(json.dumps(gpt2 | {"embd_pdrop": 0.3, "attn_pdrop": 0.0}))
    found = parsed(FROM).model
    assert (found.hidden_dropout, found.attention_dropout, found.seq_length) == (0.3, 0.0, 1024)
    (folder / "config.json").write_text(json.dumps(gpt2 | {"embd_pdrop": 0.1}))
    assert message(FROM) == (
        "models/m/config.json: embd_pdrop: contradicts another key; got 0.1; "
        "make them equal: the model has one hidden_dropout"
    )


def test_a_run_folder_has_all_sizes_and_needs_no_other_file(folder: Path) -> None:
    found = parsed("", load="hf:models/m")
    text = dump_experiment(found)
    (folder / "config.json").unlink()
    assert parse_recorded(text, "r") == found
    with pytest.raises(RequestError, match=r"r: model\.from: is not a field; got 'hf:models/m'; "):
        parse_recorded(REST + TRAIN + FROM, "r")


def test_a_plan_reads_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.parent / "e.yaml"
    file.write_text(REST + "model: {seq_length: 1024}\ntrain: {train_iters: 1, load: 'hf:models/m'}\n")
    plan = ["plan", str(file), "--nodes", "1", "--gpus-per-node", "1", "--gpu", "h100"]
    assert main(plan) == 0
    assert "596,049,920" in capsys.readouterr().out
    assert main([*plan, "--set", "model.num_layers=4"]) == 2
    assert "model.num_layers: the model in models/m has 28; got 4; set it to 28" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(b"")
    assert main(plan) == 2
    assert "model.safetensors is cut short" in capsys.readouterr().err
