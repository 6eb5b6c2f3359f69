"""Checkpoints that are brought together from nodes with disks of their own."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.conftest import Lab
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.checkpoint_files import Entry, Manifest, is_complete, read_manifest
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs import fetch as fetching
from tridock.ops.runs import saved_checkpoints
from tridock.ops.runs.cluster_runs import Run
from tridock.ops.runs.fetch import fetch, fetch_checkpoint

RUN = "demo-20261122-110613-14b7"
FIELDS = {
    "name": "t",
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8, "vocab_size": 9},
    "batch": {"micro_batch_size": 1},
    "data": {"data_path": "data/x", "vocab_file": "gpt2/gpt2-vocab.json", "merge_file": "gpt2/gpt2-merges.txt"},
    "train": {"train_iters": 2},
}


@pytest.fixture
def nodes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Two nodes with disks of their own: each has its part of iterations 1 and 2, and the first one its part of 3."""

    def inside(node: str, *argv: str, stdin: bytes | None = None) -> Command:
        own = str(lab.workspace(node))
        return Command(tuple(it.replace(run_folder.WORKSPACE, own) for it in argv), stdin=stdin)

    monkeypatch.setattr(lab.client, "inside", inside)
    write(lab, "node-1", f"runs/{RUN}/experiment.yaml", json.dumps(FIELDS).encode())
    write(lab, "node-1", f"runs/{RUN}/metrics.jsonl", b"{}\n")
    for name in ("data/tokenizer.json", "gpt2/gpt2-vocab.json"):
        write(lab, "node-1", name, b"{}")
    save(lab, f"runs/{RUN}/checkpoints")
    return lab


def run_info(state: RunState) -> RunInfo:
    return RunInfo(RUN, state, None, "20261122-110613", None, "demo", (), None, None, None)


def write(lab: Lab, node: str, name: str, content: bytes) -> None:
    path = lab.workspace(node) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def save(lab: Lab, folder: str) -> None:
    for iteration, on in ((1, 2), (2, 2), (3, 1)):
        names = {"node-1": "rank-0.pt", "node-2": "rank-1.pt"}
        entries = {}
        for node, name in names.items():
            place = f"{folder}/iter_{iteration:07d}"
            write(lab, node, f"{place}/{name}", f"{name} {iteration}".encode() * 1000)
            entries[node] = Entry.of(lab.workspace(node) / place / name)
        for node in list(names)[:on]:
            (other,) = set(names) - {node}
            manifest = Manifest({names[node]: entries[node]}, {names[other]: entries[other]})
            write(lab, node, f"{place}/files.json", manifest.to_bytes())


def bring(lab: Lab, iteration: int | None = None) -> int | None:
    home, found = fetch_checkpoint(lab.client, Run(RUN, "node-1"), Path("runs"), iteration)
    assert home == Path("runs", RUN)
    return found


def test_the_newest_whole_checkpoint_comes_home_alone_with_its_tokenizer(
    nodes: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bring(nodes) == 2
    here = nodes.project / "runs" / RUN
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["iter_0000002"]
    assert is_complete(here / "checkpoints/iter_0000002")
    manifest = read_manifest(here / "checkpoints/iter_0000002")
    assert isinstance(manifest, Manifest)
    assert ([*manifest.here], manifest.elsewhere) == (["rank-0.pt", "rank-1.pt"], {})
    assert {path.name for path in (here / "tokenizer").iterdir()} == {"tokenizer.json", "gpt2-vocab.json"}
    assert (here / "metrics.jsonl").exists()
    said = f"{RUN}: fetch the checkpoint of iteration 2, 2 files, 22 kB\n"
    assert capsys.readouterr().err == said
    assert bring(nodes, 1) == 1
    assert {path.name for path in (here / "checkpoints").iterdir()} == {"iter_0000001", "iter_0000002"}


def test_what_is_here_with_its_hash_is_not_fetched_again(nodes: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    bring(nodes)
    checkpoint = nodes.project / "runs" / RUN / "checkpoints/iter_0000002"
    inodes = {path.name: path.stat().st_ino for path in checkpoint.glob("*.pt")}
    for node in ("node-1", "node-2"):  # a file that is read there again would not match
        for path in nodes.workspace(node).glob(f"runs/{RUN}/checkpoints/iter_0000002/*.pt"):
            path.write_bytes(b"other")
    capsys.readouterr()
    assert bring(nodes) == 2
    assert capsys.readouterr().err.endswith(", 2 files, 22 kB; 0 kB are not here yet\n")
    assert {path.name: path.stat().st_ino for path in checkpoint.glob("*.pt")} == inodes
    save(nodes, f"runs/{RUN}/checkpoints")
    (checkpoint / "rank-1.pt").write_bytes(b"damaged")
    assert bring(nodes) == 2
    assert is_complete(checkpoint)
    assert (checkpoint / "rank-0.pt").stat().st_ino == inodes["rank-0.pt"]


def test_a_replicas_file_counts_whichever_replica_another_node_lists(nodes: Lab) -> None:
    """Of Megatron v1.1.5 the replicas' files of one name differ, and a node lists that of one of them."""
    place = f"runs/{RUN}/checkpoints/iter_0000002"
    manifest = read_manifest(nodes.workspace("node-1") / place)
    assert isinstance(manifest, Manifest)
    listed = Manifest(manifest.here, {"rank-1.pt": Entry(7, "of a replica that is away")})
    write(nodes, "node-1", f"{place}/files.json", listed.to_bytes())
    assert bring(nodes) == 2
    assert is_complete(nodes.project / "runs" / RUN / "checkpoints/iter_0000002")


def test_a_checkpoint_that_is_not_whole_or_not_there(nodes: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, got in ((3, "--iteration 3"), (7, "--iteration 7")):
        with pytest.raises(RequestError) as caught:
            bring(nodes, asked)
        assert (
            str(caught.value)
            == f"{RUN}: no whole checkpoint of it is on the nodes that are up; got {got}; whole are 1, 2"
        )
    monkeypatch.setattr(nodes.client, "running", lambda: ("node-1",))
    with pytest.raises(RequestError) as caught:
        bring(nodes)
    assert str(caught.value) == (
        f"{RUN}: no whole checkpoint of it is on the nodes that are up; "
        "wait until it has saved (train.save_interval), or bring up the nodes that have the rest (tridock up)"
    )
    assert list((nodes.project / "runs").iterdir()) == []


def test_a_checkpoint_in_a_folder_of_its_own(nodes: Lab) -> None:
    fields = {**FIELDS, "train": {"train_iters": 2, "checkpoint_folder": "ckpt"}}
    write(nodes, "node-1", f"runs/{RUN}/experiment.yaml", json.dumps(fields).encode())
    save(nodes, "ckpt")
    shutil.rmtree(nodes.workspace("node-1") / f"runs/{RUN}/checkpoints")
    assert bring(nodes) == 2
    assert is_complete(nodes.project / "runs" / RUN / "checkpoints/iter_0000002")


def test_a_checkpoint_that_the_run_removes_meanwhile(nodes: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    download = saved_checkpoints.download

    def late(client: NodeClient, commands: Any, folder: Path, suffix: str, *given: Any) -> dict[str, Path]:
        for node in nodes.hosts:
            if suffix == ".tar":
                shutil.rmtree(nodes.workspace(node) / f"runs/{RUN}/checkpoints/iter_0000002")
        return download(client, commands, folder, suffix, *given)

    monkeypatch.setattr(saved_checkpoints, "download", late)
    with pytest.raises(ClusterError) as caught:
        bring(nodes)
    assert str(caught.value) == (
        f"{RUN}: the checkpoint of iteration 2 was removed while it was fetched; "
        "try again; train.keep_checkpoints is how many a run keeps"
    )
    assert [*(nodes.project / "runs").iterdir()] == []


@pytest.mark.parametrize("fault", ["damage", "disk", "ctrl-c"])
def test_nothing_is_left_of_a_checkpoint_that_does_not_arrive(
    nodes: Lab, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "damage":
        write(nodes, "node-2", f"runs/{RUN}/checkpoints/iter_0000002/rank-1.pt", b"x" * 11_000)
    else:

        def fail(*_: object, **__: object) -> None:
            raise KeyboardInterrupt if fault == "ctrl-c" else OSError(28, "No space left on device")

        monkeypatch.setattr(saved_checkpoints, "write_atomic", fail)
    wanted = {"damage": ClusterError, "disk": ClusterError, "ctrl-c": KeyboardInterrupt}[fault]
    with pytest.raises(wanted) as caught:
        bring(nodes)
    if fault == "damage":
        got = "sha256 f93282553469… instead of 7fdf952ff0a5…"
        assert str(caught.value) == (
            f"{RUN}/iter_0000002/rank-1.pt on node-2: has changed since it was saved; got {got}; "
            "restore it, or continue from another checkpoint"
        )
    if fault == "disk":
        todo = "free space there, or make it writable, then try again"
        assert str(caught.value) == f"runs/{RUN}: could not be written; got No space left on device; {todo}"
    assert [*(nodes.project / "runs").iterdir()] == []


def test_one_that_the_run_removes_while_it_is_read(nodes: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """tar ends with 0: it leaves out what it cannot read."""
    download = saved_checkpoints.download

    def removed(client: NodeClient, commands: Any, folder: Path, suffix: str, *given: Any) -> dict[str, Path]:
        found = download(client, commands, folder, suffix, *given)
        for node in nodes.hosts if suffix == ".tar" else ():
            shutil.rmtree(nodes.workspace(node) / f"runs/{RUN}/checkpoints/iter_0000002", ignore_errors=True)
            tarfile.open(found[node], "w").close()
        return found

    monkeypatch.setattr(saved_checkpoints, "download", removed)
    with pytest.raises(ClusterError, match="the checkpoint of iteration 2 was removed while it was fetched"):
        bring(nodes)


# ---- all checkpoints -----------------------------------------------------------------------------


def test_every_whole_checkpoint_comes_home_and_whatever_else_is_beside_them(
    nodes: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "list_runs", lambda _: [run_info(RunState.RUNNING)])
    write(nodes, "node-1", f"runs/{RUN}/checkpoints/latest", b"iter_0000003")
    write(nodes, "node-2", f"runs/{RUN}/checkpoints/best/weights", b"of a program of its own")
    here = fetch(nodes.client, Run(RUN, "node-1"), Path("runs"), checkpoints=True) / "checkpoints"
    assert {path.name for path in here.iterdir()} == {"best", "iter_0000001", "iter_0000002", "latest"}
    assert (is_complete(here / "iter_0000001"), is_complete(here / "iter_0000002")) == (True, True)
    assert (here / "best/weights").read_bytes() == b"of a program of its own"
    assert {path.name for path in (here.parent / "tokenizer").iterdir()} == {"tokenizer.json", "gpt2-vocab.json"}
    last = f"note: not fetched: {RUN}/iter_0000003, which is not whole on the nodes that are up (no rank-1.pt)"
    said = "fetch the checkpoint of iteration"
    assert capsys.readouterr().err.splitlines() == [*(f"{RUN}: {said} {it}, 2 files, 22 kB" for it in (2, 1)), last]
    fetch(nodes.client, Run(RUN, "node-1"), Path("runs"), checkpoints=True)
    rest = "2 files, 22 kB; 0 kB are not here yet"
    assert capsys.readouterr().err.splitlines() == [*(f"{RUN}: {said} {it}, {rest}" for it in (2, 1)), last]


def test_of_a_run_that_is_over_those_that_are_not_whole_are_an_error(
    nodes: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nodes.workspace("node-2") / f"runs/{RUN}/checkpoints/iter_0000001/rank-1.pt").rename(
        nodes.workspace("node-1") / f"runs/{RUN}/checkpoints/iter_0000001/rank-1.pt"
    )
    place = nodes.workspace("node-1") / f"runs/{RUN}/checkpoints/iter_0000001"
    entries = {name: Entry.of(place / name) for name in ("rank-0.pt", "rank-1.pt")}
    (place / "files.json").write_bytes(Manifest(entries).to_bytes())
    monkeypatch.setattr(nodes.client, "running", lambda: ("node-1",))
    monkeypatch.setattr(fetching, "list_runs", lambda _: [run_info(RunState.FAILED)])
    with pytest.raises(ClusterError) as caught:
        fetch(nodes.client, Run(RUN, "node-1"), Path("runs"), checkpoints=True)
    todo = "bring up the others (tridock up), then try again"
    what = "is not whole on the nodes that are up; got no rank-1.pt"
    assert str(caught.value).splitlines() == [f"{RUN}/iter_000000{number}: {what}; {todo}" for number in (2, 3)]
    here = nodes.project / "runs" / RUN
    assert (here / "metrics.jsonl").exists()
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["iter_0000001"]


def test_one_bad_checkpoint_does_not_keep_the_others(nodes: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "list_runs", lambda _: [run_info(RunState.RUNNING)])
    write(nodes, "node-2", f"runs/{RUN}/checkpoints/iter_0000002/rank-1.pt", b"x" * 11_000)
    write(nodes, "node-1", f"runs/{RUN}/checkpoints/iter_0000009/files.json", b"of a program of its own")
    with pytest.raises(ClusterError, match=f"^{RUN}/iter_0000002/rank-1.pt on node-2: has changed since"):
        fetch(nodes.client, Run(RUN, "node-1"), Path("runs"), checkpoints=True)
    here = nodes.project / "runs" / RUN / "checkpoints"
    assert {path.name for path in here.iterdir()} == {"iter_0000001", "iter_0000009"}
    assert is_complete(here / "iter_0000001")


@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_another_nodes_copy_takes_the_place_of_a_bad_one(nodes: Lab, fault: str) -> None:
    place = f"runs/{RUN}/checkpoints/iter_0000002"
    content = (nodes.workspace("node-2") / place / "rank-1.pt").read_bytes()
    write(nodes, "node-1", f"{place}/rank-1.pt", content)
    for node in ("node-1", "node-2"):
        names = [path.name for path in (nodes.workspace(node) / place).glob("*.pt")]
        entries = {name: Entry.of(nodes.workspace(node) / place / name) for name in names}
        write(nodes, node, f"{place}/files.json", Manifest(entries).to_bytes())
    bad = nodes.workspace("node-1") / place / "rank-1.pt"
    bad.unlink() if fault == "missing" else bad.write_bytes(b"x" * len(content))
    assert bring(nodes) == 2
    here = nodes.project / "runs" / RUN / "checkpoints/iter_0000002"
    assert (is_complete(here), (here / "rank-1.pt").read_bytes() == content) == (True, True)
