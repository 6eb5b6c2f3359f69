"""Checkpoints of Megatron-LM v1.1.5: joined from all its ranks, whatever version ordered their queries and keys."""

from __future__ import annotations

import enum
import random
import re
import sys
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.train.pretrained_models import assert_equal, gpt_of, loaded, loading, part
from tests.unit.train.test_huggingface import GPT2, LLAMA, TOKENS
from tridock.errors import RequestError
from tridock.node.probes.pretrained import stored_weights
from tridock.train.models.gpt import GPT
from tridock.train.pretrained import pretrained_weights

FIELDS = {**GPT2, "activation_func": "gelu"}
ROWS = 64
"""TOKENS with a padding to a multiple of 16 x 2."""
ARGS = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 16, "layernorm_epsilon": 1e-5, "bias_gelu_fusion": False, "openai_gelu": False,
    "apply_residual_connection_post_layernorm": False, "params_dtype": torch.float32,
}  # fmt: skip
NAMES = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "final_norm": "transformer.final_layernorm",
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "dense_h_to_4h": "mlp.dense_h_to_4h",
    "dense_4h_to_h": "mlp.dense_4h_to_h",
}


def shards(gpt: GPT, ranks: int, version: float = 2.0) -> list[dict[str, Tensor]]:
    """Each tensor parallel rank's weights by v1.1.5's names, ordered as this version's attention expects."""
    found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, given in gpt.named_parameters():
        weight = given.detach()
        module, _, kind = name.rpartition(".")
        prefix, module = re.match(r"(layers\.\d+\.)?(.*)", module).groups()  # type: ignore[union-attr]
        theirs = f"{'transformer.' + prefix if prefix else ''}{NAMES[module]}.{kind}"
        if module == "token_embedding":
            weight = torch.cat([weight[:TOKENS], torch.full((ROWS - TOKENS, 32), 7.0)])
        if module in ("token_embedding", "attention.query_key_value", "dense_h_to_4h"):
            parts = list(weight.chunk(ranks))
        elif kind == "weight" and module in ("attention.dense", "dense_4h_to_h"):
            parts = list(weight.chunk(ranks, 1))
        else:
            parts = [weight] * ranks
        for rank, one in enumerate(parts):
            if module == "attention.query_key_value" and version == 0:
                one = one.unflatten(0, (-1, 3, 8)).transpose(0, 1).flatten(0, 2)
            elif module == "attention.query_key_value" and version == 1:
                one = one.unflatten(0, (-1, 3, 8)).transpose(1, 2).flatten(0, 2)
            found[rank][f"language_model.{theirs}"] = one.clone()
    return found


def nested(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What ``state_dict_for_save_checkpoint`` makes of them."""
    model: dict[str, Any] = {"embedding": {"word_embeddings": {}, "position_embeddings": {}}, "transformer": {}}
    for name, weight in weights.items():
        _, place, rest = name.split(".", 2)
        if place == "embedding":
            table, _, kind = rest.partition(".")
            model[place][table][kind] = weight
        else:
            model[place][rest] = weight
    return {"language_model": model}


def plain(
    folder: Path, gpt: GPT, ranks: int = 2, version: float | None = 2.0, name: str = "iter_0000007", **more: Any
) -> Path:
    """What v1.1.5 saves without DeepSpeed."""
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("release" if name == "release" else "7")
    for rank, weights in enumerate(shards(gpt, ranks, version or 0)):
        place = folder / name / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        state = {
            "args": Namespace(**ARGS, rank=rank),
            "iteration": 7,
            "model": nested(weights),
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            **({} if version is None else {"checkpoint_version": version}),
            **more,
        }
        torch.save(state, place / "model_optim_rng.pt", _use_new_zipfile_serialization=name != "release")
    return folder


def with_deepspeed(folder: Path, gpt: GPT, stage: int, ranks: int = 2) -> Path:
    """What v1.1.5 saves with DeepSpeed, with two data parallel ranks: fp16 and ZeRO's fp32."""
    checkpoint = folder / "global_step7"
    checkpoint.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for rank, weights in enumerate(shards(gpt, ranks)):
        halves = {name: weight.half() for name, weight in weights.items()}
        for number in range(2):
            state = {
                "module": nested(halves if stage < 3 else dict.fromkeys(halves, torch.empty(0))),
                "param_shapes": [{name: weight.shape for name, weight in weights.items()}] if stage else None,
                "buffer_names": [],
                "shared_params": {},
                "iteration": 7,
            }
            prefix = f"zero_pp_rank_{number}_" if stage == 3 else ""
            torch.save(state, checkpoint / f"{prefix}mp_rank_{rank:02d}_model_states.pt")
            if stage == 3:
                flat, key = torch.cat([part(it, number, 2) for it in weights.values()]), "fp32_flat_groups"
            else:
                joined = torch.cat([it.flatten() for it in weights.values()])
                flat, key = part(joined, number, 2), "single_partition_of_fp32_groups"
            if stage:
                optimizer = {"zero_stage": stage, "partition_count": 2, key: [flat]}
                file = checkpoint / f"zero_pp_rank_{number}_mp_rank_{rank:02d}_optim_states.pt"
                torch.save({"optimizer_state_dict": optimizer}, file)
    return folder


def pipeline(folder: Path, gpt: GPT, ranks: int = 2) -> Path:
    """What a pipeline saves: a file per module of ``GPT2ModelPipe``."""
    checkpoint = folder / "global_step7"
    checkpoint.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    for rank, weights in enumerate(shards(gpt, ranks)):
        files: dict[int, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            rest = name.removeprefix("language_model.")
            if rest.startswith("embedding."):
                number, key = 0, rest.removeprefix("embedding.")
            elif layer := re.match(r"transformer\.layers\.(\d+)\.(.*)", rest):
                number, key = int(layer[1]) + 2, layer[2]
            else:
                number, key = 2 + 3, rest.rpartition(".")[2]
            files.setdefault(number, {})[key] = weight
        for number, own in files.items():
            torch.save(own, checkpoint / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        torch.save({"module": None}, checkpoint / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def megatron(folder: Path, fields: Mapping[str, Any] = FIELDS) -> dict[str, Tensor]:
    return loaded(folder, fields, "megatron")


WRITERS: dict[str, Callable[[Path, GPT], Path]] = {
    "version 2": plain,
    "version 1": lambda folder, gpt: plain(folder, gpt, version=1.0),
    "version 0": lambda folder, gpt: plain(folder, gpt, version=None),
    "torch before 1.6": lambda folder, gpt: plain(folder, gpt, 1, name="release"),
    "ZeRO 1": lambda folder, gpt: with_deepspeed(folder, gpt, 1),
    "ZeRO 2": lambda folder, gpt: with_deepspeed(folder, gpt, 2, 1),
    "ZeRO 3": lambda folder, gpt: with_deepspeed(folder, gpt, 3),
    "pipeline": pipeline,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_are_joined_from_all_tensor_parallel_ranks(tmp_path: Path, writer: str) -> None:
    gpt = gpt_of(FIELDS)
    folder = WRITERS[writer](tmp_path / "ck", gpt)
    assert_equal(megatron(folder), gpt)
    (checkpoint,) = (path for path in folder.iterdir() if path.is_dir())
    assert_equal(megatron(checkpoint), gpt)
    found = stored_weights("megatron", folder)
    has_args = writer.startswith(("version", "torch"))
    ranks = 1 if writer in ("torch before 1.6", "ZeRO 2") else 2
    heads = {"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 8, "activation_func": "gelu"}
    assert found.problem is None
    assert (found.rows, found.rows_divisible_by) == (ROWS, (16 if has_args else 128) * ranks)
    assert found.fields.items() >= {"num_layers": 2, "hidden_size": 32, "max_position_embeddings": 16}.items()
    assert found.has_config == has_args
    assert (found.fields.items() >= heads.items()) == has_args


@pytest.mark.parametrize("writer", ["torch before 1.6", "ZeRO 3"])
def test_nothing_is_kept_once_the_model_has_its_weights(tmp_path: Path, writer: str) -> None:
    folder = WRITERS[writer](tmp_path / "ck", gpt_of(FIELDS))
    weights = pretrained_weights(loading(folder, FIELDS, "megatron"), Path("/"), TOKENS)
    assert weights is not None
    items = weights.items  # what the model keeps
    left = weakref.ref(items.__self__._stored)  # type: ignore[attr-defined]
    assert len(dict(items())) == 28
    weights.close()
    assert left() is None


def test_without_zero_the_weights_have_the_precision_of_the_training(tmp_path: Path) -> None:
    gpt = gpt_of(FIELDS)
    found = megatron(with_deepspeed(tmp_path / "ck", gpt, 0))
    own = dict(gpt.named_parameters())
    assert [name for name in found if not torch.equal(found[name], own[name][: len(found[name])].half())] == []


def refusal(folder: Path, fields: Mapping[str, Any] = FIELDS) -> str:
    with pytest.raises(RequestError) as error:
        megatron(folder, fields)
    return str(error.value).replace(str(folder), "DIR")


def both(folder: Path, fields: Mapping[str, Any] = FIELDS) -> str:
    """What a rank and a node say, which is the same."""
    (problem,) = [stored_weights("megatron", folder).problem]
    assert refusal(folder, fields) == str(problem).replace(str(folder), "DIR")
    return refusal(folder, fields)


def test_fields_that_differ_are_named_with_their_values(tmp_path: Path) -> None:
    folder = plain(tmp_path / "ck", gpt_of(FIELDS))
    have = "the weights of train.load have"
    other = {"num_layers": 3, "num_attention_heads": 2, "seq_length": 8, "activation_func": "gelu_tanh"}
    assert refusal(folder, {**FIELDS, **other}) == "\n".join(
        f"model.{name}: {have} {there}; got {here}; set it to {there}"
        for name, there, here in (
            ("num_layers", 2, 3),
            ("max_position_embeddings", 16, 8),
            ("num_attention_heads", 4, 2),
            ("num_query_groups", 4, 2),
            ("kv_channels", 8, 16),
            ("activation_func", "gelu", "gelu_tanh"),
        )
    )
    assert f"model.normalization: {have} LayerNorm; got RMSNorm; set it to LayerNorm" in refusal(folder, LLAMA)
    fused = plain(tmp_path / "fused", gpt_of(FIELDS), args=Namespace(**{**ARGS, "bias_gelu_fusion": True}))
    assert refusal(fused) == f"model.activation_func: {have} gelu_tanh; got gelu; set it to gelu_tanh"
    megatron(fused, {**FIELDS, "activation_func": None})


@pytest.mark.parametrize(("tokens", "fits"), [(31, False), (33, True), (64, True), (65, False)])
def test_a_vocabulary_must_be_the_token_table_without_its_padding(tmp_path: Path, tokens: int, fits: bool) -> None:
    folder = plain(tmp_path / "ck", gpt_of(FIELDS))
    experiment = loading(folder, {**FIELDS, "vocab_size": None}, "megatron")
    if fits:
        weights = pretrained_weights(experiment, Path("/"), tokens)
        assert weights is not None
        assert len(weights.read("token_embedding.weight")) == tokens
        return
    with pytest.raises(RequestError) as error:
        pretrained_weights(experiment, Path("/"), tokens)
    assert str(error.value) == (
        "model.vocab_size: the token table of train.load has 64 rows, with a padding of less than 32; got"
        f" {tokens}; use data of the tokenizer that the weights go with"
    )


def test_missing_files_are_named_by_node_and_rank(tmp_path: Path) -> None:
    gpt = gpt_of(FIELDS)
    todo = "name the folder of --save, or one checkpoint in it (iter_…, release, global_step…)"
    copy = "copy the files of all ranks into this one folder"
    (tmp_path / "none").mkdir()
    assert both(tmp_path / "none") == (
        "DIR: holds no checkpoint of Megatron-LM; got neither latest_checkpointed_iteration.txt nor"
        f" mp_rank_…/model_optim_rng.pt nor DeepSpeed's files; {todo}"
    )
    folder = plain(tmp_path / "a", gpt)
    (folder / "latest_checkpointed_iteration.txt").write_text("9\n")
    assert both(folder) == (
        "DIR/latest_checkpointed_iteration.txt: names a checkpoint that is not there; none of iter_0000009,"
        f" global_step9 has files; got 9; {todo}"
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
    (folder / "iter_0000007/mp_rank_00/model_optim_rng.pt").unlink()
    assert both(folder) == (
        "DIR/iter_0000007: lacks files of model parallel ranks; got mp_rank_00/model_optim_rng.pt; " + copy
    )
    stages = pipeline(tmp_path / "b", gpt)
    (stages / "global_step7/layer_03-model_01-model_states.pt").unlink()
    assert both(stages) == f"DIR/global_step7: lacks files of layers; got layer_03-model_01-model_states.pt; {copy}"
    zero = with_deepspeed(tmp_path / "c", gpt, 1)
    (zero / "global_step7/zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    assert "was written by 2 ranks and lacks files of some" in str(stored_weights("megatron", zero).problem)
    assert "is no checkpoint that zero_to_fp32 reads" in refusal(zero)


def test_other_models_are_refused(tmp_path: Path) -> None:
    gpt = gpt_of(FIELDS)
    bert = nested(shards(gpt, 1)[0])
    bert["language_model"]["pooler"] = {"dense.weight": torch.ones(32, 32)}
    folder = plain(tmp_path / "a", gpt, 1, model=bert)
    assert refusal(folder) == (
        "DIR/iter_0000007, tensor parallel rank 0: holds weights that the experiment's model lacks; got"
        " language_model.pooler.dense.weight; change the model's fields, or name a checkpoint of its pretrain_gpt2.py"
    )
    todo = "name a checkpoint of pretrain_gpt2.py; convert another, or one of Megatron Core, with its own tools"
    core = {"decoder.final_layernorm.weight": torch.ones(32)}
    no_words = "no language_model.embedding.word_embeddings.weight"
    assert both(plain(tmp_path / "b", gpt, 1, model=core)) == (
        f"DIR/iter_0000007: is of no GPT-2 of Megatron-LM; got {no_words}; {todo}"
    )
    others = {
        "apply_residual_connection_post_layernorm": (True, False),
        "swiglu": (True, False),
        "apply_layernorm_1p": (True, False),
        "num_experts": (8, False),
        "add_bias_linear": (False, True),
        "position_embedding_type": ("rope", "learned_absolute"),
    }
    for name, (value, wanted) in others.items():
        assert both(plain(tmp_path / name, gpt, args=Namespace(**{**ARGS, name: value}))) == (
            f"DIR/iter_0000007: is no GPT-2: its {name} is not {wanted}; got {value};"
            " convert it with its own tools, and use hf:DIR"
        )
    assert refusal(plain(tmp_path / "d", gpt, version=4.0)) == (
        "DIR/iter_0000007: has a checkpoint_version that no known Megatron-LM writes; got 4.0; convert it with the"
        " Megatron-LM that wrote it, to a transformers folder, and use train.load: hf:DIR"
    )


@pytest.fixture(params=["this torch", "base image 24.12"])
def either_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """That base's allows an object under its own name only, as torch 2.5 does."""
    if request.param == "this torch":
        return
    allow: Any = torch.serialization.safe_globals
    monkeypatch.setattr(torch, "__version__", "2.6.0a0+df5bbc09d1.nv24.12")

    def older(allowed: list[Any]) -> Any:
        assert [it for it in allowed if not it.__module__ or not it.__name__] == []
        return allow(allowed)

    monkeypatch.setattr(torch.serialization, "safe_globals", older)


@pytest.mark.usefixtures("either_torch")
def test_megatrons_own_loss_scaler_is_no_obstacle_and_other_objects_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("megatron.fp16.loss_scaler")

    class DynamicLossScaler:
        def __init__(self) -> None:
            self.cur_scale = 2.0**16

    DynamicLossScaler.__module__, DynamicLossScaler.__qualname__ = module.__name__, "DynamicLossScaler"
    module.DynamicLossScaler = DynamicLossScaler  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.fp16"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    gpt = gpt_of(FIELDS)
    folder = plain(tmp_path / "ck", gpt, optimizer={"loss_scaler": DynamicLossScaler()})
    monkeypatch.delitem(sys.modules, module.__name__)
    assert_equal(megatron(folder), gpt)
    assert stored_weights("megatron", folder).problem is None
    odd = plain(tmp_path / "odd", gpt, optimizer={"state": torch.nn.Linear(1, 1)})
    assert both(odd) == (
        "DIR/iter_0000007/mp_rank_00/model_optim_rng.pt: holds an object that is not loaded, because a pickle can run"
        " any code; got torch.nn.modules.linear.Linear; save it again without the object where you trust the file"
        " (torch.load, torch.save), or copy it again"
    )


def later(folder: Path, gpt: GPT, ranks: int, stages: int, virtual: int, *, since_2023: bool, **args: Any) -> Path:
    """What Megatron-LM since v2.0 saves of its legacy models (megatron/training/checkpointing.py): a folder for each
    tensor and pipeline parallel rank; the layers are an encoder with self-attention, numbered from 0 in each part of
    the model. Norms have shorter names since the end of 2023."""
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for rank, weights in enumerate(shards(gpt, ranks)):
        whole = nested(weights)["language_model"]
        theirs = {name.replace(".attention.", ".self_attention."): it for name, it in whole["transformer"].items()}
        if since_2023:
            theirs = {
                re.sub("(input|post_attention|final)_layernorm", r"\1_norm", name): theirs[name] for name in theirs
            }
        norm = {name: it for name, it in theirs.items() if not name.startswith("layers.")}
        count = gpt.shape.model.num_layers
        each = count // (stages * virtual)
        for stage in range(stages):
            models: list[dict[str, Any]] = []
            for chunk in range(virtual):
                first = chunk * (count // virtual) + stage * each
                own: dict[str, Tensor] = {}
                for number in range(each):
                    prefix = f"layers.{first + number}."
                    found = {name: it for name, it in theirs.items() if name.startswith(prefix)}
                    own |= {name.replace(prefix, f"layers.{number}.", 1): it for name, it in found.items()}
                begins, ends = (chunk, stage) == (0, 0), (chunk, stage) == (virtual - 1, stages - 1)
                language: dict[str, Any] = {"embedding": whole["embedding"]} if begins else {}
                model: dict[str, Any] = {"language_model": language | {"encoder": own | (norm if ends else {})}}
                if ends and not begins:
                    model["word_embeddings_for_head"] = {"weight": whole["embedding"]["word_embeddings"]["weight"]}
                models.append(model)
            place = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            place.mkdir(parents=True)
            given = {"num_layers": count, "ffn_hidden_size": 128, "kv_channels": 8, "add_bias_linear": True}
            given |= {"position_embedding_type": "learned_absolute", "swiglu": False, "num_experts": None}
            state = {
                "args": Namespace(**{**ARGS, **given, **args}, rank=rank),
                "checkpoint_version": 3.0,
                "iteration": 7,
                **({"model": models[0]} if virtual == 1 else {f"model{it}": one for it, one in enumerate(models)}),
                "rng_state": [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}],
            }
            torch.save(state, place / "model_optim_rng.pt")
    return folder


LATER = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 4, 1)]


@pytest.mark.parametrize("since_2023", [False, True])
@pytest.mark.parametrize(("ranks", "stages", "virtual"), LATER)
def test_later_versions_have_a_folder_for_each_stage(
    tmp_path: Path, ranks: int, stages: int, virtual: int, since_2023: bool
) -> None:
    fields = {**FIELDS, "num_layers": 4}
    gpt = gpt_of(fields)
    folder = later(tmp_path / "ck", gpt, ranks, stages, virtual, since_2023=since_2023)
    assert_equal(megatron(folder, fields), gpt)
    found = stored_weights("megatron", folder)
    assert found.problem is None
    assert (found.fields["num_layers"], found.rows) == (4, ROWS)
    assert refusal(folder, {**fields, "num_layers": 3}) == (
        "model.num_layers: the weights of train.load have 4; got 3; set it to 4"
    )


def test_a_stage_that_is_missing_is_named(tmp_path: Path) -> None:
    fields = {**FIELDS, "num_layers": 4}
    folder = later(tmp_path / "ck", gpt_of(fields), 2, 2, 1, since_2023=True)
    (folder / "iter_0000007/mp_rank_01_000/model_optim_rng.pt").unlink()
    assert both(folder, fields) == (
        "DIR/iter_0000007: lacks files of model parallel ranks; got mp_rank_01_000/model_optim_rng.pt;"
        " copy the files of all ranks into this one folder"
    )


@pytest.mark.usefixtures("either_torch")
def test_enums_in_the_arguments_of_later_versions_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("megatron.core.enums")
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=module.__name__)  # type: ignore[misc]
    module.ModelType = kind  # type: ignore[attr-defined]
    gpt = gpt_of(FIELDS)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        folder = later(tmp_path / "ck", gpt, 1, 2, 1, since_2023=False, model_type=kind(1))
    assert_equal(megatron(folder), gpt)
    assert stored_weights("megatron", folder).problem is None
