"""`tridock data sync`: its messages, and the index maps as far as no container is needed."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.ops.conftest import Lab
from tridock import cli
from tridock.contracts.codec import encode
from tridock.contracts.node_answers import IndexMaps
from tridock.errors import Problem, TridockError
from tridock.ops.hosts.facts import Container
from tridock.ops.sync import Row, operation, transfer
from tridock.ops.sync.shared import OPERATOR
from tridock.remote import Host

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
        operation.run(lab.session, paths, Path(config) if config else None, [], say, dry_run=dry_run)
    except TridockError as error:
        return f"{shown.getvalue()}{error}\n"
    return shown.getvalue()


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
    assert sorted(files.below("node-1")) == ["data/x.bin", "data/x.idx"]
    files.write("data/x.json", b"{}")
    run(files, ["data/unrelated"], "configs/t.yaml", **MEGATRON)
    everything = ["merges.txt", "unrelated", "vocab.json", "x.bin", "x.idx", "x.json"]
    assert sorted(files.below("node-2")) == [f"data/{name}" for name in everything]


def test_a_path_alone_asks_for_no_experiment(files: Lab) -> None:
    assert "index maps" not in run(files, ["data/unrelated"])


def test_without_anything_it_is_the_experiment_of_a_launch(files: Lab) -> None:
    assert run(files, []).startswith("configs/demo-3d.yaml: ")


def test_data_that_are_not_here_or_not_below_the_workspace(files: Lab) -> None:
    (files.project / "data/x.bin").unlink()
    assert run(files, [], "configs/t.yaml") == (
        "configs/t.yaml: data.data_path: is not here; got data/x.bin; "
        "make it first (tridock data preprocess, or tridock data demo), or give another\n"
    )
    elsewhere = MEGATRON["data"] | {"data_path": "/corpus/x", "vocab_file": "../vocab.json"}
    todo = "what is mounted there is the hosts' own; name a path below /workspace to have it copied"
    assert run(files, [], "configs/t.yaml", **{**MEGATRON, "data": elsewhere}).splitlines() == [
        f"configs/t.yaml: data.data_path: is outside the workspace; got /corpus/x.bin; {todo}",
        f"configs/t.yaml: data.data_path: is outside the workspace; got /corpus/x.idx; {todo}",
        f"configs/t.yaml: data.vocab_file: is outside the workspace; got ../vocab.json; {todo}",
    ]


def test_an_experiment_that_is_illegal_is_refused_before_anything_is_asked(files: Lab) -> None:
    shown = run(files, [], "configs/t.yaml", batch={"micro_batch_size": 2, "global_batch_size": 3})
    assert shown.startswith("configs/t.yaml: batch.global_batch_size: ")
    assert not (files.project.parent / "node-1").exists()


# ---- index maps ----------------------------------------------------------------------------------


def test_no_maps_while_the_head_is_not_up(files: Lab) -> None:
    up = f"tridock up --hosts {files.session.cluster.hostfile_path}"
    assert run(files, [], "configs/t.yaml", **MEGATRON).splitlines()[-1] == (
        f"index maps: not made, the node on node-1 is not up; run {up} first, or the nodes make them at a launch"
    )
    assert "index maps" not in run(files, [], "configs/t.yaml", dry_run=True, **MEGATRON)


PREFIX = "data/x_train_indexmap_2ns_8sl_1234s_"


@pytest.fixture
def nodes(files: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    """Nodes that are up: a `docker` on PATH, which makes maps on the head, or fails with the files `out` and `err`."""
    read_state = files.session.read_state

    def up(node: str, host: Host) -> Any:
        container = Container("1", "2", running=True, recipe=None, exit_code=0, health="healthy")
        return replace(read_state(node, host), container=container)

    monkeypatch.setattr(files.session, "read_state", up)
    names = [f"{PREFIX}{part}_idx.npy" for part in ("doc", "sample", "shuffle")] + ["data/x_indexmap.sha256"]
    answer = json.dumps({"made": 3, "files": [Path(name).name for name in names]})
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >{tmp_path}/asked\n'
        f"if [ -e {tmp_path}/err ]; then cat {tmp_path}/out; cat {tmp_path}/err >&2; exit 2; fi\n"
        f"cd {files.workspace('node-1')}\n"
        f"for name in {' '.join(names)}; do [ -e $name ] || echo map $name >$name; done\n"
        f"echo '{answer}'\n"
    )
    docker.chmod(docker.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return files


def test_maps_are_made_on_the_head_and_copied_to_the_others(nodes: Lab, tmp_path: Path) -> None:
    stale = nodes.workspace("node-2") / "data/x_train_indexmap_999ns_8sl_1234s_doc_idx.npy"
    other = nodes.workspace("node-2") / "data/y_train_indexmap_999ns_8sl_1234s_doc_idx.npy"
    stale.parent.mkdir(parents=True)
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
    assert asked.startswith("exec --user 1:1 --workdir /workspace --env HOME=/home/tridock tridock-lab ")
    assert "python -P -m tridock.train.megatron_lm.index_maps --data-parallel-size 2 " in asked
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


def test_a_map_that_changes_while_it_is_read(nodes: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    read = operation.read_command
    monkeypatch.setattr(operation, "read_command", lambda workspace, name: read(workspace, "data/x.idx"))
    shown = run(nodes, [], "configs/t.yaml", **MEGATRON).splitlines()
    assert f"node-1: {PREFIX}doc_idx.npy changed while it was read; try again" in shown


def test_nodes_that_share_the_data_need_no_copy(nodes: Lab) -> None:
    nodes.workspace("node-1").mkdir(parents=True)
    nodes.workspace("node-2").parent.mkdir(parents=True)
    nodes.workspace("node-2").symlink_to(nodes.workspace("node-1"))
    assert run(nodes, [], "configs/t.yaml", **MEGATRON).splitlines()[-1] == "index maps: 3 files, made on node-1"


# ---- the two command lines -----------------------------------------------------------------------


def test_tridock_data_sync_is_the_same(files: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(operation, "run", lambda *given, **named: asked.append((given[1:4], named)))
    arguments = ["--hosts", "hostfiles/lab", "--path", "data/x", "--path", "data", "--set", "a=1", "--config", "c.yaml"]
    assert cli.main(["data", "sync", *arguments, "--dry-run"]) == 0
    assert asked == [((["data/x", "data"], Path("c.yaml"), ["a=1"]), {"dry_run": True})]


def test_where_there_is_no_ssh_it_says_so(files: Lab) -> None:
    program = (
        "import sys\nsys.modules['fabric'] = None\nfrom tridock import cli\n"
        "sys.exit(cli.main(['data', 'sync', '--hosts', 'hostfiles/lab']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "--hosts: needs the package fabric; "
        "got import of fabric halted; None in sys.modules; "
        "run it on the machine from which you manage the hosts: a node has no access to them\n",
    )


def test_every_script_passes_shellcheck(tmp_path: Path) -> None:
    commands = [
        transfer.probe_command("w", "n", ("p",), make=True),
        transfer.seen_command("w", ("n",), ("p",)),
        transfer.unprobe_command("w", "n", ("p",)),
        transfer.list_command("w", []),
        transfer.receive_command("w", "p", "q", 0, 1, "s", None),
        transfer.unpack_command("w", "f"),
        transfer.drop_maps_command("w", "p"),
    ]
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    for number, made in enumerate(commands):
        path = tmp_path / f"{number}.sh"
        path.write_text("#!/bin/sh\n" + made.argv[2])
    done = subprocess.run([shellcheck, *tmp_path.glob("*.sh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
