"""Folders of transformers' models: what a launch says of them, from the files' headers, before a rank starts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.patience import STEP_S
from tests.unit.train.pretrained_models import (
    before_and_in_ranks,
    gpt_of,
    loaded,
    names_and_weights,
    preflight,
    refusal,
)
from tests.unit.train.test_huggingface import KINDS, LLAMA, TOKENS
from tridock.errors import RequestError
from tridock.experiment.model import Model
from tridock.experiment.transformers_config import config_of
from tridock.experiment.transformers_weights import transformers_shapes
from tridock.node.probes.pretrained import stored_weights

AGAIN = "download it again: transformers' save_pretrained writes it"
DESCRIBED = (
    "download all of it, or name a folder whose every weight config.json describes, without adapters and quantization"
)


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
         "LlamaForCausalLM, GraniteForCausalLM, MistralForCausalLM, Olmo2ForCausalLM, Phi3ForCausalLM, "
         "Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM, MixtralForCausalLM, "
         "Qwen2MoeForCausalLM, Qwen3MoeForCausalLM"),
        ({"hidden_act": "relu"}, 'config.json: hidden_act: is not supported; got "relu"; use a model that has "silu"'),
        ({"num_attention_heads": "four"}, f'config.json: num_attention_heads: is no whole number; got "four"; {AGAIN}'),
        ({"num_attention_heads": None}, f"config.json: num_attention_heads: is no whole number; got null; {AGAIN}"),
        ({"num_attention_heads": True}, f"config.json: num_attention_heads: is no whole number; got true; {AGAIN}"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads: "),
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config | odd))
        assert before_and_in_ranks(folder, LLAMA, "hf").startswith(wanted)
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    assert before_and_in_ranks(folder, LLAMA, "hf") == (
        f"config.json: describes no model; got no num_hidden_layers; {AGAIN}"
    )


def test_a_transformers_folder_without_some_weights_is_refused_before_the_ranks_start(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder, weights = transformers_folder(tmp_path / "model", LLAMA)
    file = folder / "model.safetensors"
    save_file({name: it for name, it in weights.items() if "layers.1.mlp" not in name}, file)
    assert before_and_in_ranks(folder, LLAMA, "hf") == (
        "train.load: DIR lacks weights of the experiment's model; got model.layers.1.mlp.up_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.down_proj.weight; "
        f"{DESCRIBED}"
    )
    save_file({**weights, "model.norm.weight": torch.ones(31)}, file)
    assert before_and_in_ranks(folder, LLAMA, "hf") == (
        "train.load: model.norm.weight in DIR has another shape than in the experiment's model; got 31, not 32; "
        f"{DESCRIBED}"
    )
    # What transformers ignores, too: tables of rotations, and a tied output layer that was written.
    tied = weights["model.embed_tokens.weight"].clone()
    more = {"lm_head.weight": tied, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**weights, **more}, file)
    assert preflight(folder, LLAMA, "hf") == []
    assert loaded(folder, LLAMA, "hf")
    tied[-1, -1] += 1.0
    odd = {"lm_head.weight": tied, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    save_file({**weights, **odd}, file)
    assert before_and_in_ranks(folder, LLAMA, "hf") == (
        "train.load: DIR holds weights that the experiment's model lacks; got lm_head.weight, "
        f"model.layers.0.self_attn.rotary_emb.inv_freq; {DESCRIBED}"
    )
    save_file({**weights, "model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    assert "; got model.layers.2.self_attn.rotary_emb.inv_freq; " in before_and_in_ranks(folder, LLAMA, "hf")


def both(folder: Path) -> str:
    """What a node and the ranks say."""
    with pytest.raises(RequestError) as error:
        loaded(folder, LLAMA, "hf")
    assert [stored_weights("hf", folder).problem] == list(error.value.problems)
    return str(error.value)


def changed_header(whole: bytes, name: str, **fields: Any) -> bytes:
    """A file whose header says something else about a weight."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header[name] |= fields
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]


def test_damaged_files_of_a_transformers_folder_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = transformers_folder(tmp_path / "model", LLAMA, 2)
    file, index = folder / "1.safetensors", folder / "model.safetensors.index.json"
    whole, places = file.read_bytes(), json.loads(index.read_text())
    size, header = len(whole), 8 + int.from_bytes(whole[:8], "little")
    again, no_file = "download it again", "is no file of safetensors; got"
    entries = json.loads(whole[8:header])
    first, (_, bytes_) = min(((name, it["data_offsets"]) for name, it in entries.items()), key=lambda it: it[1])
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
        (changed_header(whole, first, shape=[1]), f"{no_file} {bytes_:,} bytes for {first}, not 4"),
        (changed_header(whole, first, dtype="I8", data_offsets=[0, bytes_ - 4]), f"{no_file} a weight at byte "),
        (pointer, "is a pointer of Git LFS, not the file itself; got a pointer to 5 bytes; fetch it: git -C "),
    ):
        file.write_bytes(content)
        assert str(stored_weights("hf", folder).problem).startswith(f"{file}: {wanted}"), content[:9]
        assert refusal(folder, LLAMA, "hf").startswith(f"1.safetensors: {wanted}")
    file.write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {**places["weight_map"], "a": "1.safetensors"}}))
    assert str(stored_weights("hf", folder).problem) == (
        f"{folder}: lacks weights that model.safetensors.index.json names; got a; download all of the model"
    )
    names = {name: file for name, file in places["weight_map"].items() if name != "model.norm.weight"}
    index.write_text(json.dumps({"weight_map": names}))
    shard = places["weight_map"]["model.norm.weight"]
    assert both(folder) == (
        f"{folder}: holds weights that model.safetensors.index.json does not name; got model.norm.weight in {shard};"
        " download all of the model"
    )
    index.write_text(json.dumps(places))
    twice = dict(load_file(folder / "0.safetensors"))
    moved = next(iter(twice))
    save_file({**load_file(file), moved: twice[moved]}, file)
    assert both(folder) == (
        f"{folder}: holds weights that model.safetensors.index.json does not name; got {moved} in 1.safetensors;"
        " download all of the model"
    )
    file.write_bytes(whole)
    for name in ("model.safetensors", "adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_bytes(whole)
        assert both(folder) == (
            f"{folder}: holds weights beside those of model.safetensors.index.json; got {name}; move them away, or"
            " merge adapters"
        )
        (folder / name).unlink()
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


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, kind: str, odd: float, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    folder, weights = transformers_folder(tmp_path / "model", KINDS[kind])
    name = [name for name, it in weights.items() if it.dim() == 2][-1]
    weights[name][3, 5] = odd
    save_file({name: it.to(dtype) for name, it in weights.items()}, folder / "model.safetensors")
    assert refusal(folder, KINDS[kind], "hf") == (
        f"DIR: {name}: has elements that are not finite; got {odd};"
        " download it again, or load weights from before the training diverged"
    )


def test_the_message_about_pickles_has_the_command_that_converts_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder, weights = transformers_folder(tmp_path / "it's a model", LLAMA)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    problem = stored_weights("hf", folder).problem
    assert problem is not None
    assert (problem.what, problem.got) == ("holds weights in pickles, which are not read", "pytorch_model.bin")
    assert both(folder) == str(problem)
    command = problem.todo.partition(": ")[2]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        command, shell=True, check=True, env={**os.environ, "PATH": path}, timeout=STEP_S, capture_output=True
    )
    assert preflight(folder, LLAMA, "hf") == []
    own = dict(gpt_of(LLAMA).named_parameters())
    found = loaded(folder, LLAMA, "hf")
    assert all(torch.equal(found[name], own[name][:TOKENS]) for name in found if "query_key" not in name)
