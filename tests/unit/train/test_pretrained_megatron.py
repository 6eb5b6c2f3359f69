"""Checkpoints of Megatron-LM v1.1.5: joined from all its ranks, whatever version ordered their queries and keys."""

from __future__ import annotations

import enum
import sys
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.train import megatron_checkpoints
from tests.unit.train.megatron_checkpoints import (
    ARGS,
    FIELDS,
    ROWS,
    WRITERS,
    later,
    nested,
    pipeline,
    plain,
    shards,
    with_deepspeed,
)
from tests.unit.train.pretrained_models import assert_equal, gpt_of, loaded, loading, preflight
from tests.unit.train.test_huggingface import GPT2, LLAMA, TOKENS
from tridock.errors import RequestError
from tridock.node.probes.pretrained import stored_weights
from tridock.train.pretrained import pretrained_weights


def megatron(folder: Path, fields: Mapping[str, Any] = FIELDS) -> dict[str, Tensor]:
    return loaded(folder, fields, "megatron")


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_are_joined_from_all_tensor_parallel_ranks(tmp_path: Path, writer: str) -> None:
    gpt = gpt_of(FIELDS)
    folder = WRITERS[writer](tmp_path / "ck", gpt)
    assert_equal(megatron(folder), gpt)
    (checkpoint,) = (path for path in folder.iterdir() if path.is_dir())
    assert_equal(megatron(checkpoint), gpt)
    found = stored_weights("megatron", folder)
    assert preflight(folder, FIELDS, "megatron") == []
    has_args = writer.startswith(("version", "torch"))
    ranks = 1 if writer in ("torch before 1.6", "ZeRO 2") else 2
    heads = {"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 8, "activation_func": "gelu"}
    assert found.problem is None
    assert (found.rows, found.rows_divisible_by) == (ROWS, (16 if has_args else 128) * ranks)
    assert found.fields.items() >= {"num_layers": 2, "hidden_size": 32, "max_position_embeddings": 16}.items()
    assert found.has_config == has_args
    assert (found.fields.items() >= heads.items()) == has_args


TODO = "change the model's fields, or name a checkpoint of its pretrain_gpt2.py"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        lambda weights: weights.pop("language_model.transformer.layers.1.mlp.dense_4h_to_h.bias"),
        "train.load: PLACE, tensor parallel rank RANK, lacks weights of the experiment's model; got"
        f" language_model.transformer.layers.1.mlp.dense_4h_to_h.bias; {TODO}",
    ),
    "misshapen": (
        lambda weights: weights.update({"language_model.transformer.layers.0.attention.dense.bias": torch.ones(33)}),
        "train.load: language_model.transformer.layers.0.attention.dense.bias in PLACE, tensor parallel rank RANK, has"
        f" another shape than in the experiment's model; got 33, not 32; {TODO}",
    ),
    "odd": (
        lambda weights: weights.update({"language_model.transformer.layers.0.extra.weight": torch.ones(2)}),
        "train.load: PLACE, tensor parallel rank RANK, holds weights that the experiment's model lacks; got"
        f" language_model.transformer.layers.0.extra.weight; {TODO}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("writer", WRITERS)
def test_weights_that_do_not_fit_are_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, damage: str
) -> None:
    """The last tensor parallel rank's, which no rank but the last would read first."""
    change, expected = DAMAGES[damage]
    ranks = 1 if writer in ("torch before 1.6", "ZeRO 2") else 2

    whole = megatron_checkpoints.shards

    def changed(*given: Any) -> list[dict[str, Tensor]]:
        found = whole(*given)
        change(found[-1])
        return found

    gpt, write = gpt_of(FIELDS), WRITERS[writer]
    monkeypatch.setattr(megatron_checkpoints, "shards", changed)
    folder = write(tmp_path / "ck", gpt)
    (checkpoint,) = (path for path in folder.iterdir() if path.is_dir())
    problems = preflight(folder, FIELDS, "megatron")
    assert [str(it) for it in problems] == [expected.replace("PLACE", str(checkpoint)).replace("RANK", str(ranks - 1))]
    with pytest.raises(RequestError) as error:
        megatron(folder)
    assert list(error.value.problems) == problems


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
        "train.load: DIR/iter_0000007, tensor parallel rank 0, holds weights that the experiment's model lacks; got"
        " language_model.pooler.dense.weight; change the model's fields, or name a checkpoint of its pretrain_gpt2.py"
    )
    todo = "name a checkpoint of pretrain_gpt2.py; convert another, or one of Megatron Core, with its own tools"
    core = {"decoder.final_layernorm.weight": torch.ones(32)}
    no_words = "no language_model.embedding.word_embeddings.weight"
    assert both(plain(tmp_path / "b", gpt, 1, model=core)) == (
        f"DIR/iter_0000007: is of no GPT-2 of Megatron-LM; got {no_words}; {todo}"
    )
    others: dict[str, tuple[Any, str]] = {
        "apply_residual_connection_post_layernorm": (True, "False"),
        "squared_relu": (True, "False"),
        "apply_layernorm_1p": (True, "False"),
        "num_experts": (8, "False"),
        "position_embedding_type": ("none", "learned_absolute or rope"),
        "rotary_base": (500000, "10000"),
    }
    for name, (value, wanted) in others.items():
        assert both(plain(tmp_path / name, gpt, args=Namespace(**{**ARGS, name: value}))) == (
            f"DIR/iter_0000007: is of a model that is not read: its {name} is not {wanted}; got {value};"
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
    assert preflight(folder, fields, "megatron") == []
    assert found.problem is None
    assert (found.fields["num_layers"], found.rows) == (4, ROWS)
    assert refusal(folder, {**fields, "num_layers": 3}) == (
        "model.num_layers: the weights of train.load have 4; got 3; set it to 4"
    )


LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "rotary_base": 10000, "untie_embeddings_and_output_weights": True},
    "tied, half rotated, with biases of queries, keys and values": {
        **LLAMA, "rotary_base": 10000, "rotary_percent": 0.5, "add_qkv_bias": True,
    },
    "swiglu with biases, LayerNorm": {**GPT2, "ffn_hidden_size": 48, "swiglu": True},
}  # fmt: skip


@pytest.mark.parametrize("fields", LLAMAS.values(), ids=LLAMAS)
@pytest.mark.parametrize(("ranks", "stages", "virtual"), LATER)
def test_later_versions_llamas_are_read(
    tmp_path: Path, fields: dict[str, Any], ranks: int, stages: int, virtual: int
) -> None:
    fields = {**fields, "num_layers": 4}
    gpt, is_llama = gpt_of(fields), "position_embedding_type" in fields
    own = ("ffn_hidden_size", "swiglu", "norm_epsilon", "rotary_percent", "add_qkv_bias", "num_query_groups")
    given = {name: fields[name] for name in (*own, "untie_embeddings_and_output_weights") if name in fields}
    given = {"add_qkv_bias": True, **given} if fields.get("add_bias_linear", True) else given  # as Megatron sets it
    if is_llama:
        given |= {"normalization": "RMSNorm", "add_bias_linear": False, "group_query_attention": True}
        given |= {"position_embedding_type": "rope", "rotary_base": 10000}
    folder = later(tmp_path / "ck", gpt, ranks, stages, virtual, since_2023=True, **given)
    assert_equal(megatron(folder, fields), gpt)
    assert preflight(folder, fields, "megatron") == []
    have = "the weights of train.load have"
    assert [str(it) for it in preflight(folder, {**fields, "swiglu": False}, "megatron")] == [
        f"model.swiglu: {have} true; got false; set it to true"
    ]
    if is_llama:
        other = {**fields, "rotary_base": 500000, "num_query_groups": 4}
        assert [str(it) for it in preflight(folder, other, "megatron")] == [
            f"model.rotary_base: {have} 10000; got 500000.0; set it to 10000",
            f"model.num_query_groups: {have} 2; got 4; set it to 2",
        ]


def test_a_stage_that_is_missing_is_named(tmp_path: Path) -> None:
    fields = {**FIELDS, "num_layers": 4}
    folder = later(tmp_path / "ck", gpt_of(fields), 2, 2, 1, since_2023=True)
    (folder / "iter_0000007/mp_rank_01_000/model_optim_rng.pt").unlink()
    assert both(folder, fields) == (
        "DIR/iter_0000007: lacks files of model parallel ranks; got mp_rank_01_000/model_optim_rng.pt;"
        " copy the files of all ranks into this one folder"
    )


@pytest.mark.usefixtures("either_torch")
@pytest.mark.parametrize("with_getattr", [False, True], ids=["by its value", "as Python 3.11.0 to 3.11.3 does"])
def test_enums_in_the_arguments_of_later_versions_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_getattr: bool
) -> None:
    module = types.ModuleType("megatron.core.enums")
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=module.__name__)  # type: ignore[misc]
    module.ModelType = kind  # type: ignore[attr-defined]
    pickled = (lambda it, _: (getattr, (kind, it.name))) if with_getattr else (lambda it, _: (kind, (it.value,)))
    kind.__reduce_ex__ = pickled  # type: ignore[assignment, method-assign]
    gpt = gpt_of(FIELDS)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        folder = later(tmp_path / "ck", gpt, 1, 2, 1, since_2023=False, model_type=kind(1))
    assert_equal(megatron(folder), gpt)
    assert stored_weights("megatron", folder).problem is None
