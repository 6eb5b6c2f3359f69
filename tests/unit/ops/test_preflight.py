"""What a launch refuses after it asked the nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import make_plan, with_fields
from tridock.contracts.node_answers import Fingerprint, NvmeFolder, PreflightAnswer
from tridock.contracts.pretrained import StoredWeights
from tridock.contracts.supervision import contract
from tridock.errors import Problem, TridockError
from tridock.experiment import Experiment, fields_digest
from tridock.experiment.transformers_weights import transformers_shapes
from tridock.ops.hosts.session import Session
from tridock.ops.runs.preflight import (
    Preflight,
    _differences,
    check_nodes,
    mismatches,
    multicast_problems,
    nvme_problems,
    package_problems,
    preflight_argv,
    too_little_memory,
)
from tridock.remote import Completed

BIN, IDX, VOCAB, MERGES = "data/t_document.bin", "data/t_document.idx", "data/vocab.json", "data/merges.txt"
GOOD: dict[str, Any] = {
    BIN: {"bytes": 100, "sha256": None},
    IDX: {"bytes": 42, "sha256": "aa"},
    VOCAB: {"bytes": 7, "sha256": "bb", "entries": 9},
    MERGES: {"bytes": 7, "sha256": "cc"},
}


def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, Any], head: Mapping[str, Any], **fields: Any
) -> Preflight:
    """The answer of two nodes: node-1 leads and holds what is GOOD, node-2 holds ``files``."""
    (tmp_path / "lab").write_text("node-1 slots=1\nnode-2 slots=1\n")
    session = Session.open(tmp_path / "lab")
    asked: dict[str, tuple[str, ...]] = {}
    train, launch = {"load": fields.pop("load", None)}, fields

    def node_verb(node: str, *arguments: str, stdin: bytes | None, timeout: float) -> Completed:
        asked[node] = arguments
        read = {"data/t_document.json": {"vocab_size": 9, "tokens": 100, "bin_sha256": "ee"}}
        read[f"{train['load']}/layout.json"] = {}
        answer = {"files": GOOD, "read": read, "contract": contract(), **head} if node == "node-1" else {"files": files}
        return Completed(0, json.dumps(answer).encode(), b"")

    monkeypatch.setattr(session, "node_verb", node_verb)
    experiment = Experiment.model_validate(
        {
            "name": "t",
            "engine": "megatron-deepspeed",
            "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
            "batch": {"micro_batch_size": 1},
            "precision": "fp32",
            "data": {"data_path": "data/t_document", "vocab_file": VOCAB, "merge_file": MERGES},
            "train": {"train_iters": 1, **train},
            "launch": launch,
        }
    )
    try:
        plan = make_plan(experiment, session.cluster.slots, "t.yaml")
        return check_nodes(session, Path("t.yaml"), experiment, plan)
    finally:
        assert asked["node-2"] == ("preflight", "--", BIN, IDX, VOCAB, MERGES)
        assert asked["node-1"][:2] == ("preflight", "--head")
        assert "--read=data/t_document.json" in asked["node-1"]
        assert train["load"] is None or f"--load={train['load']}" in asked["node-1"]
        assert asked["node-1"][-5:] == ("--", BIN, IDX, VOCAB, MERGES)


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
        "data/tokenizer/tokenizer.json on the first node; copy it there, or leave the prompts out"
    )


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


def test_layers_of_a_package_that_a_nodes_image_lacks() -> None:
    fields = {
        "name": "t",
        "engine": "megatron-core",
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t_document"},
        "train": {"train_iters": 1},
    }
    asked = "--package=transformer_engine"
    assert asked not in preflight_argv(Experiment.model_validate(fields), head=False)
    experiment = with_fields(fields, {"model.transformer_impl": "transformer_engine"})
    assert asked in preflight_argv(experiment, head=False)
    answers = {name: PreflightAnswer({}, missing_packages=("transformer_engine",)) for name in ("a", "b")}
    (problem,) = package_problems(Path("t.yaml"), experiment, {**answers, "c": PreflightAnswer({})})
    assert str(problem) == (
        "t.yaml: model.transformer_impl: needs the Python package transformer_engine; got not on a, b; "
        "leave the field out, or build the image on a base that has it"
    )


def test_an_overlap_that_a_nodes_gpus_cannot_do() -> None:
    fields = {
        "name": "t",
        "engine": "megatron-core",
        "precision": "bf16",
        "model": {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 8},
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t_document"},
        "train": {"train_iters": 1},
    }
    assert "--multicast" not in preflight_argv(Experiment.model_validate(fields), head=False)
    experiment = with_fields(fields, {"parallel.tp_comm_overlap": True})
    assert {"--multicast", "--package=transformer_engine"} <= {*preflight_argv(experiment, head=False)}
    answers = {name: PreflightAnswer({}, multicast=has) for name, has in (("a", True), ("b", False))}
    (problem,) = multicast_problems(Path("t.yaml"), experiment, answers)
    assert str(problem) == (
        "t.yaml: parallel.tp_comm_overlap: needs GPUs with CUDA multicast (Hopper and newer, with NVSwitch); "
        "got none on b; leave it out"
    )
    by_ipc = with_fields(fields, {"parallel.tp_comm_overlap": True, "env": {"UB_SKIPMC": "1"}})
    assert not list(multicast_problems(Path("t.yaml"), by_ipc, answers))
    assert "--multicast" not in preflight_argv(by_ipc, head=False)


OFFLOADING: dict[str, Any] = {
    "name": "t",
    "model": {"preset": "gpt3-13b", "seq_length": 2048},
    "parallel": {"zero_stage": 2},
    "batch": {"micro_batch_size": 1},
    "data": {"data_path": "data/t_document"},
    "train": {"train_iters": 10, "save_interval": 5},
    "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


def test_a_hosts_memory_for_offloaded_states(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 12.9 billion parameters the sixteenth of each rank, 18 bytes each; a checkpoint's copy is 2 and 12 / 16."""
    experiment = Experiment.model_validate(OFFLOADING)
    plan = make_plan(experiment, {"a": range(8), "b": range(8)}, "t.yaml")
    memory = {"a": 64 << 30, "b": 1 << 40}
    (problem,) = too_little_memory(Path("t.yaml"), experiment, plan, memory)
    assert str(problem) == (
        "t.yaml: deepspeed.zero_optimization: the offloaded states of 8 ranks need 108.4 GiB of a's memory; "
        "got 64.0 GiB; use more nodes, or offload less"
    )
    assert capsys.readouterr().err == ""
    assert list(too_little_memory(Path("t.yaml"), experiment, plan, {**memory, "a": 120 << 30})) == []
    assert capsys.readouterr().err.startswith(
        "warning: t.yaml: deepspeed.zero_optimization: with copies of a checkpoint, offloaded states need "
    )
    nothing = Experiment.model_validate(OFFLOADING | {"deepspeed": {}})
    assert list(too_little_memory(Path("t.yaml"), nothing, plan, {"a": 1, "b": 1})) == []
    assert list(too_little_memory(Path("t.yaml"), experiment, plan, {"a": None, "b": None})) == []


def test_states_that_do_not_fit_on_a_nodes_nvme() -> None:
    """Of 12.9 billion parameters the sixteenth of each rank, 16 bytes each; four buffers of 1e8 and a tensor."""
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    fields = with_fields(OFFLOADING, {"parallel.zero_stage": 3})
    experiment = Experiment.model_validate(
        OFFLOADING | {"parallel": {"zero_stage": 3}, "deepspeed": {"zero_optimization": zero}}
    )
    asked = {"--nvme=/nvme", "--package=deepspeed.ops.aio.async_io_op"}
    assert not asked & {*preflight_argv(fields, head=False)}
    assert asked <= {*preflight_argv(experiment, head=False)}
    plan = make_plan(experiment, {"a": range(8), "b": range(8)}, "t.yaml")
    good = PreflightAnswer({}, nvme={"/nvme": NvmeFolder(None, 97 << 30)})
    assert list(nvme_problems(Path("t.yaml"), experiment, plan, {"a": good, "b": good})) == []
    answers = {
        "a": PreflightAnswer({}, nvme={"/nvme": NvmeFolder("no such file or directory")}),
        "b": PreflightAnswer({}, nvme={"/nvme": NvmeFolder(None, 95 << 30)}, memlock=8 << 20),
    }
    where = "t.yaml: deepspeed.zero_optimization.offload_optimizer.nvme_path"
    assert [*map(str, nvme_problems(Path("t.yaml"), experiment, plan, answers))] == [
        f"{where}: cannot be written on a; got /nvme: no such file or directory; "
        "make the folder there, for the user of the nodes, and mount it into them (container.mounts)",
        f"{where}: 8 ranks of b need 96.4 GiB on NVMe; got 95.0 GiB free in /nvme; free space, or use more nodes",
        f"{where}: each rank locks 1772 MiB of b's memory for transfers to NVMe; got a limit of 8 MiB; "
        "raise the limit (container.ulimits.memlock), or lower sub_group_size",
    ]
    assert list(nvme_problems(Path("t.yaml"), fields, plan, {})) == []


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
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}, "loads": False}, load="runs/none")
    assert str(caught.value) == (
        "t.yaml: train.load: no such folder on the first node; got 'runs/none'; "
        "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    )


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
        ask(tmp_path, monkeypatch, GOOD, head, load="runs/a")
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
        ask(tmp_path, monkeypatch, GOOD, {"rendezvous": {"port": 1}, "loads": False}, load="megatorn:data/345m")
    assert str(caught.value) == (
        "t.yaml: train.load: no such folder on the first node; got 'megatorn:data/345m'; "
        "name a folder, or FORMAT:DIR with one of the formats hf, deepspeed, megatron"
    )


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
    assert found == Preflight(20123, data, {"torch": "2.13"})


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
        f"got 99 bytes  data/t_document.bin; {bring}/t_document\n"
        f"t.yaml: data.vocab_file: is not on node node-2; got data/vocab.json; {bring}/vocab.json\n"
        "t.yaml: data.merge_file: has different content on node node-2 than on the head; "
        f"got dd  data/merges.txt; {bring}/merges.txt"
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
