"""What a launch refuses after it asked the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import make_plan, with_fields
from tests.unit.ops.preflights import BIN, GOOD, IDX, MERGES, SHARDED, VOCAB, ask
from tridock.contracts.data_index import Part
from tridock.contracts.images import ImageArrays
from tridock.contracts.node_answers import Fingerprint, PreflightAnswer
from tridock.contracts.supervision import contract
from tridock.errors import Problem, TridockError
from tridock.experiment import Experiment, fields_digest
from tridock.ops.runs.preflight import (
    Preflight,
    _differences,
    folder_problems,
    mismatches,
    preflight_argv,
)


@pytest.mark.parametrize(
    ("fields", "folder"),
    [({}, "runs"), ({"train.checkpoint_folder": "/big/ck"}, "/big/ck"), ({"train.save": False}, None)],
)
def test_the_nodes_are_asked_whether_ranks_can_save(fields: Mapping[str, Any], folder: str | None) -> None:
    experiment = with_fields(SHARDED, fields)
    wanted = [] if folder is None else [f"--save={folder}"]
    for head in (True, False):
        assert [it for it in preflight_argv(experiment, head=head) if it.startswith("--save")] == wanted


def test_a_folder_that_a_node_cannot_write() -> None:
    experiment = with_fields(SHARDED, {})
    answers = {
        "a": PreflightAnswer({}),
        "b": PreflightAnswer({}, save_problem="permission denied"),
    }
    assert [*map(str, folder_problems(Path("t.yaml"), experiment, answers))] == [
        "t.yaml: train.save: cannot write on b; got runs: permission denied; "
        "let the user of the nodes write there, or name another folder in train.checkpoint_folder"
    ]


def test_data_that_no_rank_could_train_on() -> None:
    experiment = with_fields(SHARDED, {"train.eval_interval": 5})
    assert {"--data=data/t_document", "--split=949,50,1"} <= {*preflight_argv(experiment, head=True)}
    plan = make_plan(experiment, {"a": range(2)}, "t.yaml")

    def found(manifest: object, **answer: Any) -> list[str]:
        given = PreflightAnswer({}, {"data/t_document.json": manifest}, **answer)
        return [str(problem) for problem in mismatches(Path("t.yaml"), experiment, plan, given)]

    parts = {"data/t_document": (Part(3, 30), Part(0, 0), Part(0, 0))}
    todo = "give it a larger share, use more text, or shorten model.seq_length"
    assert found({"vocab_size": 9, "tokens": 31}, parts=parts) == [
        "t.yaml: data/t_document.json: belongs to other data: the .bin holds 30 tokens; got 31 tokens; "
        "copy all three files again, or build them again with `tridock data preprocess`",
        "t.yaml: data.split: leaves the valid split less than one sample of 9 tokens; "
        f"got 0 tokens in 0 of 3 documents of data/t_document; {todo}",
    ]
    assert found(None, parts={"data/t_document": (Part(1, 9), Part(1, 9), Part(0, 0))}) == [
        "t.yaml: model.vocab_size: is left out, and data/t_document.json beside the data does not say it; "
        "add it, or make the data with `tridock data preprocess`, which writes it down"
    ]
    damage = Problem("data/t_document.bin", "does not fit its index, which describes 6 bytes", "7 bytes", "copy it")
    assert found(None, damage=damage) == [
        "t.yaml: data.data_path: data/t_document.bin does not fit its index, which describes 6 bytes; "
        "got 7 bytes; copy it"
    ]


def test_a_blend_of_data_sets_of_which_one_does_not_fit() -> None:
    blend = {"data.data_path": (0.7, "data/a", 0.3, "data/b"), "train.eval_interval": 5}
    experiment = with_fields(SHARDED, blend)
    argv = preflight_argv(experiment, head=True)
    assert {"--data=data/a", "--data=data/b", "--read=data/a.json", "--read=data/b.json"} <= {*argv}
    assert argv[-4:] == ("data/a.bin", "data/a.idx", "data/b.bin", "data/b.idx")
    made = {name: {"vocab_size": 9, "tokens": 31, "tokenizer_sha256": name * 64} for name in "ab"}
    answer = PreflightAnswer(
        {},
        {f"data/{name}.json": manifest for name, manifest in made.items()},
        parts={"data/a": (Part(3, 30), Part(1, 1), Part(0, 0)), "data/b": (Part(3, 31), Part(0, 0), Part(0, 0))},
    )
    todo = "give it a larger share, use more text, or shorten model.seq_length"
    plan = make_plan(experiment, {"a": range(2)}, "t.yaml")
    assert [str(it) for it in mismatches(Path("t.yaml"), experiment, plan, answer)] == [
        "t.yaml: data/b.json: was made with another tokenizer than data/a, which has "
        f"tokenizer_sha256 {'a' * 64}; got {'b' * 64}; make all data sets of a run with one tokenizer",
        *(
            f"t.yaml: data.split: leaves the valid split less than one sample of 9 tokens; got {got}; {todo}"
            for got in ("1 tokens in 1 of 4 documents of data/a", "0 tokens in 0 of 3 documents of data/b")
        ),
    ]


def test_data_of_validation_that_is_named_and_too_small() -> None:
    own = {"data.data_path": None, "data.train_data_path": "data/a", "data.valid_data_path": "data/v"}
    experiment = with_fields(SHARDED, {**own, "train.eval_interval": 5})
    assert {"--data=data/a", "--data=data/v", "--split=1,0,0"} <= {*preflight_argv(experiment, head=True)}
    parts = {"data/a": (Part(3, 31), Part(0, 0), Part(0, 0)), "data/v": (Part(1, 8), Part(0, 0), Part(0, 0))}
    read: dict[str, Any] = {f"data/{name}.json": {"vocab_size": 9} for name in "av"}
    plan = make_plan(experiment, {"a": range(2)}, "t.yaml")
    found = mismatches(Path("t.yaml"), experiment, plan, PreflightAnswer({}, read, parts=parts))
    assert [str(it) for it in found] == [
        "t.yaml: data.valid_data_path: gives the valid split less than one sample of 9 tokens; "
        "got 8 tokens in 1 of 1 documents of data/v; "
        "give it a larger share, use more text, or shorten model.seq_length"
    ]


def test_prompts_without_the_tokenizer_of_the_data() -> None:
    """Only the first node reads it, so only that one is asked, before any file is written."""
    fields = {
        "name": "t",
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t_document"},
        "train": {"train_iters": 1, "sample_prompts": ["Once"]},
    }
    experiment = Experiment.model_validate(fields)
    asked = [f"--tokenizer=data/{place}tokenizer.json" for place in ("", "tokenizer/")]
    assert [word for word in preflight_argv(experiment, head=True) if "tokenizer" in word] == asked
    assert not [word for word in preflight_argv(experiment, head=False) if "tokenizer" in word]
    answer = PreflightAnswer({}, {"data/t_document.json": None}, has_tokenizer=False)
    (problem,) = mismatches(Path("t.yaml"), experiment, make_plan(experiment, {"a": [0]}, "t.yaml"), answer)
    assert str(problem) == (
        "t.yaml: train.sample_prompts: needs the tokenizer of the data; got no data/tokenizer.json and no "
        "data/tokenizer/tokenizer.json on the first node; "
        "copy it there: tridock data sync --config t.yaml; or leave the prompts out"
    )


def test_images_and_parts_of_v115_that_no_rank_could_train_on() -> None:
    def found(fields: Mapping[str, Any], **answer: Any) -> list[str]:
        experiment = Experiment.model_validate({**SHARDED, **fields})
        given = PreflightAnswer({}, {"data/t_document.json": None}, **answer)
        return [str(problem) for problem in mismatches(Path("t.yaml"), experiment, None, given)]

    vision = {"model": {"preset": "resnet50", "num_classes": 5}, "parallel": {"strategy": "ddp"}}
    assert "--images=data/t_document" in preflight_argv(Experiment.model_validate({**SHARDED, **vision}), head=True)
    arrays = ImageArrays(("|u1", (9, 3, 32, 224)), ("<i8", (9,)), (0, 9))
    assert found(vision, images=arrays) == [
        "t.yaml: data/t_document_images.npy: must be uint8 of [N, 3, 224, 224]; got uint8 of [9, 3, 32, 224]; "
        "set model.img_h and model.img_w, or correct it",
        "t.yaml: data/t_document_labels.npy: has labels outside 0 to 4; got 0 to 9; raise model.num_classes",
    ]
    upstream = {"engine": "megatron-deepspeed", "precision": "fp32", "parallel": {}}
    parts = {"data/t_document": (Part(0, 0), Part(1, 9), Part(0, 0))}
    assert found(upstream, parts=parts) == [
        "t.yaml: data.split: leaves the train split no token; got 0 tokens in 0 of 1 documents of data/t_document; "
        "give it a larger share, use more text, or shorten model.seq_length"
    ]


@pytest.mark.parametrize(
    ("prefix", "quoted"), [("data/$(touch X)", "'data/$(touch X)'"), ("--version", "./--version"), ("a/b", "a/b")]
)
def test_a_remedy_that_is_pasted_runs_nothing_else(prefix: str, quoted: str) -> None:
    answers = {
        "a": PreflightAnswer({f"{prefix}.bin": Fingerprint(1, None)}),
        "b": PreflightAnswer({f"{prefix}.bin": None}),
    }
    (problem,) = _differences(Path("t.yaml"), {f"{prefix}.bin": "data.data_path"}, "a", answers, "sync --path ")
    assert problem.todo == f"sync --path {quoted}"


def test_all_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 20123}, "image_manifest": {"torch": "2.13"}})
    data = {
        "data_sha256": {IDX: "aa", VOCAB: "bb", MERGES: "cc"},
        "data_bytes": {BIN: 100, IDX: 42, VOCAB: 7, MERGES: 7},
        "data_sha256_by_manifest": {BIN: "ee"},
    }
    assert found == Preflight(20123, {"torch": "2.13"}, data)


def test_an_image_of_the_same_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = {"experiment_fields": fields_digest()}
    found = ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 20123}, "image_manifest": manifest})
    assert found.image_manifest == manifest


def test_an_image_whose_code_would_not_know_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a git pull, before the image is built again."""
    manifest = {"experiment_fields": "another", "git_commit": "0123456789abcdef"}
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 20123}, "image_manifest": manifest})
    assert str(caught.value) == (
        "node-1: its image has another version of Tridock; "
        "got its experiments have other fields; its commit is 0123456789ab; "
        f"run tridock image, then tridock up --hosts {tmp_path}/lab"
    )
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("theirs", "shown"), [(None, "unknown"), ("5-0123", "5-0123")])
def test_an_image_that_would_not_read_the_runs_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None, shown: str
) -> None:
    """Told without the doctor too, and before anything is written: ``--no-check``."""
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 20123}, "contract": theirs})
    assert str(caught.value) == (
        f"node-1: its image has another version of Tridock; got contract {shown}, {contract()} here; "
        f"run tridock image, then tridock up --hosts {tmp_path}/lab"
    )


def test_every_difference_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**GOOD, BIN: {"bytes": 99, "sha256": None}, VOCAB: None, MERGES: {"bytes": 7, "sha256": "dd"}}
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, files, {"rendezvous": {"port": 1}})
    bring = f"copy the data to the nodes: tridock data sync --hosts {tmp_path}/lab --path data"
    assert str(caught.value) == (
        "t.yaml: data.data_path: has different content on node node-2 than on the head; "
        f"got 99 bytes  data/t_document.bin; {bring}/t_document --checksum\n"
        f"t.yaml: data.vocab_file: is not on node node-2; got data/vocab.json; {bring}/vocab.json\n"
        "t.yaml: data.merge_file: has different content on node node-2 than on the head; "
        f"got dd  data/merges.txt; {bring}/merges.txt --checksum"
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("launch", "problem", "message"),
    [
        ({"master_port": 2000}, Problem("port 2000", "is taken", "python (pid 7)", "use another"),
         "t.yaml: launch.master_port: port 2000 is taken on node-1; got python (pid 7); change it or leave it out"),
        ({}, Problem("ports", "none of 200 tried from 20000 to 29999 is free", "",
                     "give launch.master_port, or end what listens there"),
         "node-1: ports: none of 200 tried from 20000 to 29999 is free; "
         "give launch.master_port, or end what listens there"),
    ],
)  # fmt: skip
def test_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: dict[str, int], problem: Problem, message: str
) -> None:
    with pytest.raises(TridockError) as caught:
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"problem": problem.message}}, **launch)
    assert str(caught.value) == message
    assert caught.value.exit_code == 3
