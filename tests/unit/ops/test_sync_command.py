"""`tridock data sync`: its messages, and the index maps as far as no container is needed."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.unit.ops.conftest import Lab, program
from tridock import cli
from tridock.contracts.codec import encode
from tridock.contracts.node_answers import IndexMaps
from tridock.contracts.run_folder import PYTHON
from tridock.errors import ClusterError, Problem, TridockError
from tridock.ops.sync import operation, rsync
from tridock.ops.sync.operation import Row
from tridock.ops.sync.rsync import OPERATOR

CONFIG: dict[str, Any] = {
    "name": "t",
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8, "vocab_size": 9},
    "batch": {"micro_batch_size": 1},
    "precision": "fp32",
    "data": {"data_path": "data/x"},
    "train": {"train_iters": 2},
}
MEGATRON: Mapping[str, Any] = {
    "engine": "megatron-deepspeed",
    "model": {key: value for key, value in CONFIG["model"].items() if key != "vocab_size"},
    "data": {"data_path": "/workspace/data/x", "vocab_file": "data/vocab.json", "merge_file": "data/merges.txt"},
}


@pytest.fixture
def files(lab: Lab) -> Lab:
    (lab.project / "configs").mkdir()
    for name in ("x.bin", "x.idx", "vocab.json", "merges.txt", "unrelated"):
        lab.write(f"data/{name}", name.encode())
    return lab


def run(lab: Lab, paths: list[str], config: str = "", dry_run: bool = False, **fields: Any) -> str:
    if config:
        (lab.project / config).write_text(json.dumps({**CONFIG, **fields}))
    shown = io.StringIO()
    say = Console(file=shown, width=200, highlight=False, soft_wrap=True).print
    try:
        synced, maps = operation.run(lab.hosts, paths, Path(config) if config else None, [], dry_run=dry_run)
    except TridockError as error:
        return f"{error}\n"
    say(operation.table(synced.rows, dry_run=dry_run))
    failure = synced.nodes.failure()
    return shown.getvalue() + "".join(f"{it}\n" for it in (maps, failure) if it)


def cells(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]


def test_a_row_for_each_node(files: Lab) -> None:
    shown = run(files, ["data/x"])
    (first, second) = cells(shown)
    assert [first[0], *first[1:4]] == ["node-1", "2", "0", "0.0"]
    assert [second[0], *second[1:4]] == ["node-2", "2", "0", "0.0"]
    assert "│ node   │" not in shown
    assert [row[1:3] for row in cells(run(files, ["data/x"]))] == [["0", "2"]] * 2


def test_rows_of_shared_and_failed_hosts() -> None:
    rows = [
        Row("a", 1, 2, 3_400_000, 1.25, 5_000_000_000),
        Row("b", free=1, shared_with=("a",)),
        Row("c", shared_with=(OPERATOR,)),
        Row("d", failed=True),
        Row("e", 1, 0, 1, 0.0, None, ("a", OPERATOR)),
    ]
    shown = io.StringIO()
    Console(file=shown, width=200).print(operation.table(rows, dry_run=True))
    assert cells(shown.getvalue()) == [
        ["a", "1", "2", "3.4", "1.2", "5,000", ""],
        ["b", "", "", "", "", "", "shared with a"],
        ["c", "", "", "", "", "", "the project's folder"],
        ["d", "", "", "", "", "", "failed"],
        ["e", "1", "0", "0.0", "0.0", "", "shared with a, the project's folder"],
    ]
    assert "to send" in shown.getvalue()


def test_without_a_path_what_the_experiment_reads(files: Lab) -> None:
    shown = run(files, [], "configs/t.yaml")
    assert shown.splitlines()[-1] == "index maps: none are needed, engine torch finds its samples in memory"
    tokenizer = ["merges.txt", "vocab.json"]
    assert sorted(files.below("node-1")) == sorted(f"data/{name}" for name in (*tokenizer, "x.bin", "x.idx"))
    files.write("data/x.json", b"{}")
    files.write("data/tokenizer/tokenizer.json", b"{}")
    run(files, ["data/unrelated"], "configs/t.yaml", **MEGATRON)
    everything = [*tokenizer, "tokenizer/tokenizer.json", "unrelated", "x.bin", "x.idx", "x.json"]
    assert sorted(files.below("node-2")) == sorted(f"data/{name}" for name in everything)


def test_every_data_set_of_a_blend(files: Lab) -> None:
    for name in ("more/y.bin", "more/y.idx", "more/y.json"):
        files.write(f"data/{name}", b"{}")
    run(files, [], "configs/t.yaml", data={"data_path": [0.9, "data/x", 0.1, "data/more/y"]})
    sent = ["merges.txt", "more/y.bin", "more/y.idx", "more/y.json", "vocab.json", "x.bin", "x.idx"]
    assert sorted(files.below("node-2")) == [f"data/{name}" for name in sent]
    shown = run(files, [], "configs/t.yaml", data={"train_data_path": "data/x", "valid_data_path": "data/more/z"})
    assert "data/more/z.bin" in shown
    assert "data/more/z.idx" in shown


def loading(load: str, **train: Any) -> dict[str, Any]:
    return {"train": {**CONFIG["train"], "load": load, **train}}


def sent(lab: Lab, folder: str) -> list[str]:
    return sorted(name.removeprefix(f"{folder}/") for name in lab.below("node-2") if name.startswith(f"{folder}/"))


def test_the_weights_go_too_and_nothing_else_of_their_folder(files: Lab) -> None:
    weights = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    for name in (*weights, "pytorch_model.bin", "original/consolidated.00.pth", ".cache/x", "README.md"):
        files.write(f"models/llama/{name}", b"1")
    shown = run(files, [], "configs/t.yaml", **loading("hf:models/llama"))
    assert [row[1:3] for row in cells(shown)] == [["6", "0"]] * 2
    assert sent(files, "models/llama") == weights
    assert [row[1:3] for row in cells(run(files, [], "configs/t.yaml", **loading("hf:models/llama")))] == [
        ["0", "6"]
    ] * 2


def test_the_newest_checkpoint_goes_too_and_no_pointer_that_the_hosts_have_newer(files: Lab) -> None:
    folder = "runs/t/checkpoints"
    for name in ("iter_0000001/files.json", "iter_0000002/files.json", "iter_0000002/rank-0.pt", "layout.json"):
        files.write(f"{folder}/{name}", b"{}")
    files.write(f"{folder}/iter_0000003/rank-0.pt", b"not whole")
    files.write(f"{folder}/latest", b"iter_0000001")
    run(files, [], "configs/t.yaml", **loading(folder))
    assert sent(files, folder) == ["iter_0000002/files.json", "iter_0000002/rank-0.pt", "layout.json"]
    run(files, [], "configs/t.yaml", **loading(f"{folder}/iter_0000001"))
    assert "iter_0000001/files.json" in sent(files, folder)


@pytest.mark.parametrize("kind", ["deepspeed", "megatron"])
def test_the_checkpoint_of_another_program_goes_with_the_pointer_to_it(files: Lab, kind: str) -> None:
    for name in ("global_step1", "global_step2"):
        files.write(f"ckpt/{name}/mp_rank_00_model_states.pt", b"1")
    files.write("ckpt/latest", b"global_step1")
    files.write("ckpt/config.json", b"{}")
    run(files, [], "configs/t.yaml", **loading(f"{kind}:ckpt"))
    assert sent(files, "ckpt") == ["config.json", "global_step1/mp_rank_00_model_states.pt", "latest"]


def test_what_the_run_itself_writes_is_not_sent(files: Lab) -> None:
    files.write("ckpt/iter_0000001/files.json", b"{}")
    run(files, [], "configs/t.yaml", **loading("ckpt", checkpoint_folder="./ckpt"))
    assert sent(files, "ckpt") == []


def test_what_a_folder_of_weights_must_not_bring_is_refused_until_it_is_named(files: Lab, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    files.write("m/config.json", b"{}")
    (files.project / "m/model.safetensors").symlink_to(tmp_path / "blob")
    assert run(files, [], "configs/t.yaml", **loading("hf:m")) == (
        f"configs/t.yaml: train.load: leads out of its folder by a link; got m/model.safetensors, to {tmp_path}/blob; "
        f"remove it from {files.project}/m, or name it itself: --path m/model.safetensors\n"
    )
    assert files.below("node-1") == {}
    run(files, ["m/model.safetensors"], "configs/t.yaml", **loading("hf:m"))
    assert files.below("node-2")["m/model.safetensors"] == b"weights"


def test_what_is_not_here_but_on_the_hosts_is_no_error(files: Lab) -> None:
    for node in ("node-1", "node-2"):
        run(files, ["data/x", "data/vocab.json"])
        for name in ("m/config.json", "data/x.bin"):
            path = files.workspace(node) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"theirs")
    (files.workspace("node-1") / "runs/t/checkpoints/iter_0000001").mkdir(parents=True)
    (files.project / "data/x.bin").unlink()
    # Half of the data set that they have is not sent over their own.
    files.write("data/x.idx", b"of other data")
    shown = run(files, [], "configs/t.yaml", **loading("hf:m"))
    assert [row[1:3] for row in cells(shown)] == [["0", "0"]] * 2, shown
    assert (files.below("node-2")["data/x.bin"], files.below("node-2")["data/x.idx"]) == (b"theirs", b"x.idx")
    # A checkpoint to resume from comes from the node that has it.
    assert "runs/t" not in run(files, [], "configs/t.yaml", **loading("runs/t/checkpoints"))


def test_a_path_alone_asks_for_no_experiment(files: Lab) -> None:
    assert "index maps" not in run(files, ["data/unrelated"])


def test_without_anything_it_is_the_experiment_of_a_launch(files: Lab) -> None:
    assert run(files, []).startswith("configs/demo-3d.yaml: ")


def test_what_is_neither_here_nor_on_every_host(files: Lab) -> None:
    (files.project / "data/x.bin").unlink()
    make = "make it first (tridock data preprocess, or tridock data demo), or give another"
    prompts = {"sample_prompts": ["Once"]}
    lines = run(files, [], "configs/t.yaml", **loading("hf:m")).splitlines()
    assert lines == [
        f"configs/t.yaml: data.data_path: is neither here nor on node-1, node-2; got data/x.bin, data/x.idx; {make}",
        "configs/t.yaml: train.load: is neither here nor on node-1, node-2; got m; "
        "bring a transformers model folder here",
    ]
    (files.workspace("node-1") / "m").mkdir()
    lines = run(files, [], "configs/t.yaml", **loading("hf:m")).splitlines()
    assert "train.load: is neither here nor on node-2; got m" in lines[1]
    lines = run(files, [], "configs/t.yaml", **loading("runs/t/checkpoints", **prompts)).splitlines()
    assert lines[1:] == [
        "configs/t.yaml: train.load: is neither here nor on node-1, node-2; got runs/t/checkpoints; "
        "bring a checkpoint of a run of Tridock here",
        "configs/t.yaml: train.sample_prompts: is neither here nor on node-1, node-2; "
        "got data/tokenizer.json, data/tokenizer/tokenizer.json; "
        "copy the tokenizer of the data there, or leave the prompts out",
    ]
    elsewhere = MEGATRON["data"] | {"data_path": "/corpus/x", "vocab_file": "../vocab.json"}
    todo = "what is mounted there is the hosts' own; name a path below /workspace to have it copied"
    on = "is neither here nor on node-1, node-2"
    assert run(files, [], "configs/t.yaml", **{**MEGATRON, "data": elsewhere}).splitlines() == [
        f"configs/t.yaml: data.data_path: {on}; got /corpus/x.bin, /corpus/x.idx; {todo}",
        f"configs/t.yaml: data.vocab_file: {on}; got ../vocab.json; {todo}",
    ]
    assert files.below("node-1") == files.below("node-2") == {}


def test_an_experiment_that_is_illegal_is_refused_before_anything_is_asked(files: Lab) -> None:
    shown = run(files, [], "configs/t.yaml", batch={"micro_batch_size": 2, "global_batch_size": 3})
    assert shown.startswith("configs/t.yaml: batch.global_batch_size: ")
    assert files.below("node-1") == {}


# ---- index maps ----------------------------------------------------------------------------------


PREFIX = "data/x_train_indexmap_2ns_8sl_1234s_"


@pytest.fixture
def nodes(files: Lab, tmp_path: Path) -> Lab:
    """The nodes' Python makes maps, or fails with the files `out` and `err`."""
    names = [f"{PREFIX}{part}_idx.npy" for part in ("doc", "sample", "shuffle")] + ["data/x_indexmap.sha256"]
    answer = json.dumps({"made": 3, "files": [Path(name).name for name in names]})
    assert "/" not in PYTHON
    program(
        files.bin / PYTHON,
        f'echo "$@" >{tmp_path}/asked\n'
        f"if [ -e {tmp_path}/err ]; then cat {tmp_path}/out; cat {tmp_path}/err >&2; exit 2; fi\n"
        f"for name in {' '.join(names)}; do [ -e $name ] || echo map $name >$name; done\n"
        f"echo '{answer}'",
    )
    return files


def test_maps_are_made_on_the_head_and_copied_to_the_others(nodes: Lab, tmp_path: Path) -> None:
    stale = nodes.workspace("node-2") / "data/x_train_indexmap_999ns_8sl_1234s_doc_idx.npy"
    other = nodes.workspace("node-2") / "data/y_train_indexmap_999ns_8sl_1234s_doc_idx.npy"
    stale.parent.mkdir()
    for path in (stale, other):
        path.touch()
    assert run(nodes, [], "configs/t.yaml", **MEGATRON).splitlines()[-1] == (
        "index maps: 3 files, made on node-1, sent to node-2"
    )
    here, there = nodes.below("node-1"), nodes.below("node-2")
    assert there.pop(other.relative_to(nodes.workspace("node-2")).as_posix()) == b""
    assert here == there
    assert f"{PREFIX}doc_idx.npy" in here
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-P -m tridock.train.megatron_lm.index_maps --data-parallel-size 2 ")
    assert "--data-path /workspace/data/x " in asked
    assert "--deepspeed" not in asked

    before = {path: path.stat().st_ino for path in nodes.workspace("node-2").rglob("*")}
    run(nodes, [], "configs/t.yaml", **MEGATRON)
    assert {path: path.stat().st_ino for path in nodes.workspace("node-2").rglob("*")} == before
    (nodes.workspace("node-2") / f"{PREFIX}doc_idx.npy").unlink()
    assert run(nodes, [], "configs/t.yaml", **MEGATRON).endswith(", sent to node-2\n")
    assert nodes.below("node-1").items() <= nodes.below("node-2").items()


def test_the_error_of_a_head_that_can_make_no_maps(nodes: Lab, tmp_path: Path) -> None:
    problem = Problem("engine", "is not here", "/opt", "build it")
    (tmp_path / "out").write_text(encode(IndexMaps(problems=(problem,))))
    (tmp_path / "err").write_text(f"warning\n{problem}\n")
    assert run(nodes, [], "configs/t.yaml", **MEGATRON).splitlines()[-3:] == [
        "index maps: not made, see the error of node-1",
        "node-1: engine: is not here; got /opt; build it",
        "node-2: no problem here; fix the others",
    ]
    (tmp_path / "out").write_text("")
    (tmp_path / "err").write_text("Trace\nboom\n")
    assert run(nodes, [], "configs/t.yaml", **MEGATRON).splitlines()[-2] == (
        "node-1: `make the index maps` failed with exit code 2; got Trace | boom; fix that there, then try again"
    )
    assert "data/x.idx" in nodes.below("node-2")


def test_nodes_that_share_the_data_need_no_copy(nodes: Lab) -> None:
    nodes.workspace("node-2").rmdir()
    nodes.workspace("node-2").symlink_to(nodes.workspace("node-1"))
    assert run(nodes, [], "configs/t.yaml", **MEGATRON).splitlines()[-1] == "index maps: 3 files, made on node-1"


# ---- the two command lines -----------------------------------------------------------------------


def test_tridock_data_sync_is_the_same(
    files: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    failure = ClusterError(Problem("node-2", "is away", "", "wait"))
    synced = SimpleNamespace(rows=(Row("node-1", 2, 1, 11), Row("node-2", failed=True)))
    synced.nodes = SimpleNamespace(failure=lambda: failure)

    def run(*given: Any, **named: Any) -> tuple[Any, str]:
        asked.append((given[1:4], named))
        return synced, "index maps: 3 files, made on node-1"

    monkeypatch.setattr(operation, "run", run)
    arguments = ["--hosts", "hostfiles/lab", "--path", "data/x", "--path", "data", "--set", "a=1", "--config", "c.yaml"]
    assert cli.main(["data", "sync", *arguments, "--dry-run", "--checksum"]) == 3
    assert asked == [((["data/x", "data"], Path("c.yaml"), ["a=1"]), {"dry_run": True, "checksum": True})]
    said = capsys.readouterr()
    assert said.out.endswith("index maps: 3 files, made on node-1\n")
    assert cli.main(["data", "sync", *arguments, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [(it["node"], it["sent"], it["bytes"], it["failed"]) for it in found["nodes"]] == [
        ("node-1", 2, 11, False), ("node-2", 0, 0, True),
    ]  # fmt: skip
    assert (found["problems"][0]["message"], said.err) == ("node-2: is away; wait", "node-2: is away; wait\n")


def test_every_script_passes_shellcheck(tmp_path: Path) -> None:
    scripts = (*rsync.SCRIPTS, operation.SUMS, operation.DROP_MAPS)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    for number, script in enumerate(scripts):
        (tmp_path / f"{number}.sh").write_text("#!/bin/sh\n" + script)
    done = subprocess.run([shellcheck, *tmp_path.glob("*.sh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
