"""Folders of transformers' models: what a launch says of them, from the files' headers, before a rank starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.train.pretrained_models import (
    before_and_in_ranks,
    gpt_of,
    loaded,
    names_and_weights,
    preflight,
    refusal,
)
from tests.unit.train.test_huggingface import KINDS, LLAMA, TOKENS
from tridock.experiment.families import config_of
from tridock.experiment.model import Model
from tridock.experiment.transformers_weights import transformers_shapes
from tridock.node.probes.pretrained import stored_weights


def transformers_folder(folder: Path, fields: Mapping[str, Any], files: int = 1) -> tuple[Path, dict[str, Tensor]]:
    """A folder as ``save_pretrained`` writes it, and its weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    weights = names_and_weights(gpt_of(fields))
    (folder / "config.json").write_text(json.dumps(config_of(Model.model_validate(fields), TOKENS, "float32", None)))
    places = {name: f"{number % files}.safetensors" for number, name in enumerate(weights)}
    if files == 1:
        places = dict.fromkeys(weights, "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for file in {*places.values()}:
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file)
    return folder, weights


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_transformers_folder_fits(tmp_path: Path, kind: str, files: int) -> None:
    folder, weights = transformers_folder(tmp_path / "model", KINDS[kind], files)
    stored = stored_weights("hf", folder)
    assert stored.shapes == {name: tuple(it.shape) for name, it in weights.items()}
    # Written here from the model's fields, there by torch.
    assert stored.shapes == transformers_shapes(Model.model_validate(KINDS[kind]), TOKENS)
    assert preflight(folder, KINDS[kind], "hf") == []
    assert loaded(folder, KINDS[kind], "hf").keys() == dict(gpt_of(KINDS[kind]).named_parameters()).keys()


def test_a_transformers_folder_of_another_model_is_refused_before_the_ranks_start(tmp_path: Path) -> None:
    folder, _ = transformers_folder(tmp_path / "model", LLAMA)
    assert before_and_in_ranks(folder, {**LLAMA, "norm_epsilon": 1e-5, "num_layers": 3}, "hf") == (
        "model.num_layers: the model in DIR has 2; got 3; set it to 2\n"
        "model.norm_epsilon: the model in DIR has 1e-06; got 1e-05; set it to 1e-06"
    )
    config = json.loads((folder / "config.json").read_text())
    for odd, wanted in (
        ({"architectures": ["MambaForCausalLM"]},
         "config.json: is of an architecture that is not supported; got MambaForCausalLM; use one of GPT2LMHeadModel, "
         "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM, Qwen2MoeForCausalLM, "
         "Qwen3MoeForCausalLM"),
        ({"hidden_act": "relu"}, "config.json: hidden_act: is not supported; got relu; use a model that has silu"),
        ({"num_attention_heads": "four"}, "config.json: describes no model; got "),
        ({"num_attention_heads": None}, "config.json: describes no model; got "),
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config | odd))
        assert before_and_in_ranks(folder, LLAMA, "hf").startswith(wanted)
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    assert before_and_in_ranks(folder, LLAMA, "hf") == (
        "config.json: describes no model; got no 'num_hidden_layers'; "
        "download it again: transformers' save_pretrained writes it"
    )


def test_a_transformers_folder_without_some_weights_is_refused_before_the_ranks_start(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder, weights = transformers_folder(tmp_path / "model", LLAMA)
    file = folder / "model.safetensors"
    save_file({name: it for name, it in weights.items() if "layers.1.mlp" not in name}, file)
    assert before_and_in_ranks(folder, LLAMA, "hf") == (
        "train.load: DIR lacks weights of the experiment's model; got model.layers.1.mlp.up_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.down_proj.weight; download all of the model"
    )
    save_file({**weights, "model.norm.weight": torch.ones(31)}, file)
    assert before_and_in_ranks(folder, LLAMA, "hf") == (
        "train.load: model.norm.weight in DIR has another shape than in the experiment's model; got 31, not 32; "
        "download all of the model"
    )
    # What transformers ignores, too: tables of rotations, and a tied output layer that was written.
    tied = weights["model.embed_tokens.weight"].clone()
    more = {"lm_head.weight": tied, "model.layers.0.rotary.inv_freq": torch.ones(4)}
    save_file({**weights, **more}, file)
    assert preflight(folder, LLAMA, "hf") == []
    assert loaded(folder, LLAMA, "hf")


def test_damaged_files_of_a_transformers_folder_are_named(tmp_path: Path) -> None:
    folder, _ = transformers_folder(tmp_path / "model", LLAMA, 2)
    file, index = folder / "1.safetensors", folder / "model.safetensors.index.json"
    whole, places = file.read_bytes(), json.loads(index.read_text())
    size, header = len(whole), 8 + int.from_bytes(whole[:8], "little")
    again = "download it again"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    for content, wanted in (
        (whole[:-1], f"is cut short; got {size - 1:,} bytes, not {size:,}; {again}"),
        (whole[: header + 1], f"is cut short; got {header + 1:,} bytes, not {size:,}; {again}"),
        (whole[:100], f"is cut short; got 100 bytes, not {header:,}; {again}"),
        (whole[:3], f"is cut short; got 3 bytes, not 8; {again}"),
        (b"", f"is cut short; got 0 bytes; {again}"),
        (whole + b"\0", f"is longer than its header says; got {size + 1:,} bytes, not {size:,}; {again}"),
        (b"\xff" * 200, f"is no file of safetensors; got a header of 18,446,744,073,709,551,615 bytes; {again}"),
        (whole[:8] + b"[" * (size - 8), "is no file of safetensors; got "),
        (whole[:8] + b"[]".ljust(size - 8), "is no file of safetensors; got "),
        (pointer, f"is a pointer of Git LFS, not the weights; got {len(pointer)} bytes; fetch it: git lfs pull"),
    ):
        file.write_bytes(content)
        assert str(stored_weights("hf", folder).problem).startswith(f"{file}: {wanted}"), content[:9]
        assert refusal(folder, LLAMA, "hf").startswith(f"1.safetensors: {wanted}")
    file.write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {**places["weight_map"], "a": "1.safetensors"}}))
    assert str(stored_weights("hf", folder).problem) == (
        f"{folder}: lacks weights that model.safetensors.index.json names; got a; download all of the model"
    )
    for text, got in (
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", "no 'weight_map'"),
        ('{"weight_map": {}}', "no file for each weight"),
        ('{"weight_map": {"a": 1}}', "no file for each weight"),
        ('{"weight_map": 7}', "no file for each weight"),
    ):
        index.write_text(text)
        assert str(stored_weights("hf", folder).problem) == (
            f"{index}: is no index of safetensors; got {got}; download it again"
        )
        assert refusal(folder, LLAMA, "hf").startswith("model.safetensors.index.json: is no index of safetensors; ")
    index.write_text(json.dumps(places))
    assert stored_weights("hf", folder).problem is None
    for text, got in (("{", "Expecting property name"), ("[1]", "a list, no object")):
        (folder / "config.json").write_text(text)
        assert str(stored_weights("hf", folder).problem).startswith(f"{folder}/config.json: cannot be read; got {got}")
        assert refusal(folder, LLAMA, "hf").startswith(f"config.json: cannot be read; got {got}")


def test_a_transformers_folder_lacks_files(tmp_path: Path) -> None:
    todo = "name a folder that transformers' save_pretrained has written, with config.json and model.safetensors"
    assert str(stored_weights("hf", tmp_path).problem) == f"{tmp_path}: holds no config.json; {todo}"
    (tmp_path / "config.json").write_text("{}")
    lacks = f"{tmp_path}: lacks files of weights; got"
    assert str(stored_weights("hf", tmp_path).problem) == f"{lacks} model.safetensors; download all of the model"
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "1.safetensors").touch()
    assert str(stored_weights("hf", tmp_path).problem) == f"{lacks} 2.safetensors; download all of the model"
