"""What a launch refuses of the weights or the checkpoint to load, after it asked the nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import make_plan, with_fields
from tests.unit.ops.preflights import GOOD, MERGES, SHARDED, VOCAB, ask
from tridock.contracts.node_answers import PreflightAnswer
from tridock.contracts.pretrained import StoredWeights
from tridock.engines.progress import Progress
from tridock.errors import Problem, TridockError
from tridock.experiment import Experiment
from tridock.experiment.transformers_weights import transformers_shapes
from tridock.ops.runs.preflight import (
    folder_problems,
    mismatches,
    preflight_argv,
)


def test_weights_that_another_node_lacks() -> None:
    experiment = with_fields(SHARDED, {"train.load": "hf:data/m"})
    answers = {node: PreflightAnswer({}, loads=node == "a") for node in ("a", "b", "c")}
    assert [*map(str, folder_problems(Path("t.yaml"), experiment, answers))] == [
        "t.yaml: train.load: no such folder on b, c; got 'hf:data/m'; copy it there: tridock data sync --config t.yaml"
    ]


@pytest.mark.parametrize("head", [{"loads": False}, {"load_lacks": "no iter_… folder"}])
def test_a_checkpoint_that_one_node_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: Mapping[str, Any]
) -> None:
    for found, loads in (({}, False), (head, True)):  # ranks bring it to the other
        there = {"rendezvous": {"port": 1}, **found}
        ask(tmp_path, monkeypatch, GOOD, there, load="runs/a/checkpoints", loads=loads)
    with pytest.raises(TridockError, match=r"train.load: (no such folder|holds no checkpoint) on the first node"):
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}, **head}, load="runs/a/checkpoints", loads=False)


@pytest.mark.parametrize(
    ("load", "known", "says"),
    [
        ("runs/a/checkpoints", ["bb"], "train.load: goes with {}; got runs/a/checkpoints with bb; {}"),
        ("runs/b/checkpoints", [], None),
        ("runs/a/checkpoints", ["cc", "aa"], None),
        ("runs/own", None, None),
    ],
)
def test_weights_and_files_of_another_tokenizer_than_the_data(
    capsys: pytest.CaptureFixture[str], load: str, known: list[str] | None, says: str | None
) -> None:
    fields = {
        "name": "t",
        "engine": "megatron-deepspeed",
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
        "batch": {"micro_batch_size": 1},
        "precision": "fp32",
        "data": {"data_path": "data/t_document", "vocab_file": VOCAB, "merge_file": MERGES},
        "train": {"train_iters": 1, "load": load, "checkpoint_folder": "runs/own"},
    }
    experiment = Experiment.model_validate(fields)
    argv = preflight_argv(experiment, head=True)
    assert {f"--tokenizer-of={load}", f"--gpt2-file={VOCAB}", f"--gpt2-file={MERGES}"} <= {*argv}
    plan = make_plan(experiment, {"a": [0]}, "t.yaml")
    another = "another tokenizer than data/t_document, which was made with that of sha256 aa"
    todo = "use data of its tokenizer; or if the ids mean the same, set launch.allow_other_tokenizer to true"

    def found(experiment: Experiment, files: str) -> list[str]:
        read = {"data/t_document.json": {"tokenizer_sha256": "aa"}}
        own = {"tokenizers_of_weights": known, "tokenizer_of_files": files}
        answer = PreflightAnswer({}, read, **own)
        return [str(problem) for problem in mismatches(Path("t.yaml"), experiment, plan, answer)]

    files = f"t.yaml: data.vocab_file: goes with {another}; got {VOCAB} with dd; {todo}"
    assert found(experiment, "dd") == [*([f"t.yaml: {says.format(another, todo)}"] if says else []), files]
    assert found(with_fields(fields, {"launch.allow_other_tokenizer": True}), "dd") == []
    assert found(experiment, "aa") == ([f"t.yaml: {says.format(another, todo)}"] if says else [])
    unknown = f"was not checked to go with the tokenizer that made data/t_document; got no tokenizer in {load}"
    warning = f"warning: t.yaml: train.load: {unknown}; make sure of it yourself\n"
    assert capsys.readouterr().err == warning * (3 if known == [] else 0)


def test_weights_to_start_from_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "name": "t",
        "model": {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t_document"},
        "train": {"train_iters": 1, "load": "deepspeed:ck"},
    }
    experiment = Experiment.model_validate(fields)
    argv = preflight_argv(experiment, head=True)
    assert {"--load=ck", "--weights=deepspeed:ck"} <= {*argv}
    assert not [word for word in preflight_argv(experiment, head=False) if "deepspeed:" in word]

    def found(**stored: Any) -> list[str]:
        answer = PreflightAnswer({}, {"data/t_document.json": {"vocab_size": 16}}, weights=StoredWeights(**stored))
        plan = make_plan(experiment, {"a": [0]}, "t.yaml")
        return [str(problem) for problem in mismatches(Path("t.yaml"), experiment, plan, answer)]

    missing = Problem("ck/latest", "names a checkpoint that is not there", "global_step9", "name another")
    assert found(problem=missing) == [
        "t.yaml: train.load: ck/latest names a checkpoint that is not there; got global_step9; name another"
    ]
    assert capsys.readouterr().err == ""
    sizes = {"num_layers": 2, "vocab_size": 17, "max_position_embeddings": 8, "ffn_hidden_size": 64}
    assert found(fields=sizes) == [
        "t.yaml: model.num_layers: the weights of train.load have 2; got 3; set it to 2",
        "t.yaml: model.vocab_size: the weights of train.load have 17; got 16; set it to 17",
        "t.yaml: model.ffn_hidden_size: the weights of train.load have 64; got 32; set it to 64",
    ]
    assert capsys.readouterr().err == (
        "warning: t.yaml: train.load: has no config.json: fields that no weight shows (heads, norm_epsilon,"
        " rotary_base) are not checked; got deepspeed:ck; copy the model's config.json into it\n"
    )
    shapes = transformers_shapes(experiment.model, 16)
    right = {"fields": {"num_layers": 3, "vocab_size": 16}, "folder": "ck/step", "has_config": True}
    assert found(shapes=shapes, **right) == []
    few = {name: shape for name, shape in shapes.items() if "ln_2" not in name}
    todo = "change the model's fields, or use train.load: hf:DIR after save_pretrained"
    assert found(shapes=few, **right) == [
        "t.yaml: train.load: ck/step lacks weights of the experiment's model; got transformer.h.0.ln_2.weight, "
        "transformer.h.0.ln_2.bias, transformer.h.1.ln_2.weight, transformer.h.1.ln_2.bias, "
        f"transformer.h.2.ln_2.weight and 1 more; {todo}"
    ]
    assert found(shapes={**shapes, "lora": (2, 3), "transformer.ln_f.bias": (9,)}, **right) == [
        "t.yaml: train.load: transformer.ln_f.bias in ck/step has another shape than in the experiment's model; "
        f"got 9, not 8; {todo}",
        f"t.yaml: train.load: ck/step holds weights that the experiment's model lacks; got lora; {todo}",
    ]
    config = {"architectures": ["MambaForCausalLM"]}
    (refused,) = found(config=config, config_folder="ck", **right)
    assert refused.startswith(
        "t.yaml: ck/config.json: is of an architecture that is not supported; got MambaForCausalLM; use one of GPT2LM"
    )
    assert capsys.readouterr().err == ""


def test_a_tokenizer_that_is_not_the_datas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GOOD, VOCAB, {"bytes": 7, "sha256": "bb", "entries": 8})
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}})
    assert str(caught.value) == (
        "t.yaml: data.vocab_file: the data was made with 9 tokens; got 8 tokens; "
        "name the files of the tokenizer that made the data"
    )


def test_a_checkpoint_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}, "loads": False}, load="runs/none", loads=False)
    assert str(caught.value) == (
        "t.yaml: train.load: no such folder on the first node; got 'runs/none'; "
        "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    )
    run = "demo-20261122-110613-14b7"
    load = f"runs/{run}/checkpoints"
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}, "loads": False}, load=load, loads=False)
    assert str(caught.value) == (
        f"t.yaml: train.load: no such folder on the first node; got '{load}'; bring it from its own hosts: "
        f"tridock fetch --hosts HOSTFILE --run {run} --checkpoints; "
        f"then tridock data sync --hosts {tmp_path}/lab --path runs/{run}"
    )


def test_a_checkpoint_of_another_model_is_refused_before_the_ranks_start() -> None:
    experiment = with_fields(SHARDED, {"train.load": "runs/a/checkpoints"})
    assert "--progress-of=runs/a/checkpoints" in preflight_argv(experiment, head=True)
    assert "--progress-of=hf:a" not in preflight_argv(with_fields(SHARDED, {"train.load": "hf:a"}), head=True)
    plan = make_plan(experiment, {"a": range(2)}, "t.yaml")
    data = {"data/t_document.json": {"vocab_size": 9, "tokens": 99}}

    def found(**fields: object) -> list[str]:
        saved = json.loads(Progress.of(with_fields(SHARDED, fields), 8, 9).to_bytes())
        answer = PreflightAnswer({}, data, load_progress=saved)
        return [str(problem) for problem in mismatches(Path("t.yaml"), experiment, plan, answer)]

    assert found() == []
    said = "the checkpoint runs/a/checkpoints was saved with"
    assert found(**{"train.train_iters": 7, "batch.micro_batch_size": 1}) == [
        f"t.yaml: optimizer.lr_decay_iters: {said} 7; got 1; use the same, or choose the new values: "
        "--set 'train.override_checkpoint=[optimizer.lr_decay_iters]'"
    ]
    assert found(**{"model.num_layers": 4, "parallel.strategy": "ddp"}) == [
        f"t.yaml: model.num_layers: {said} 4; got 2; use the same, or start from scratch",
        f"t.yaml: parallel.strategy: {said} ddp; got fsdp; use the same, or start from scratch",
    ]
    damaged = PreflightAnswer({}, data, load_progress={"iteration": 1})  # which the ranks report
    assert list(mismatches(Path("t.yaml"), experiment, plan, damaged)) == []


@pytest.mark.parametrize(
    ("inside", "todo"),
    [
        (None, "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"),
        ("runs/a/checkpoints", "set it to runs/a/checkpoints"),
    ],
)
def test_a_folder_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str | None, todo: str
) -> None:
    head = {"rendezvous": {"port": 1}, "load_lacks": "empty", "load_inside": inside}
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, head, load="runs/a", loads=False)
    assert str(caught.value) == (
        f"t.yaml: train.load: holds no checkpoint on the first node; got runs/a: empty; {todo}"
    )


def test_a_checkpoint_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}, "load_format": "hf"}, load="data/smol")
    assert str(caught.value) == (
        "t.yaml: train.load: is a transformers model folder, of which engine megatron-deepspeed loads the weights only;"
        " got data/smol; set it to hf:data/smol"
    )
    ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}, "load_format": "megatron"}, load="checkpoints/345m")
    with pytest.raises(TridockError) as caught:
        ask(
            tmp_path,
            monkeypatch,
            GOOD,
            {"rendezvous": {"port": 1}, "loads": False},
            load="megatorn:data/345m",
            loads=False,
        )
    assert str(caught.value) == (
        "t.yaml: train.load: no such folder on the first node; got 'megatorn:data/345m'; "
        "name a folder, or FORMAT:DIR with one of the formats hf, deepspeed, megatron"
    )
