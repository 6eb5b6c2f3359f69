"""Bringing a run home where it is at home already; the rest needs hosts (tests/integration/test_fab_over_ssh.py)."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.conftest import Lab
from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import HostFacts
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.checkpoint_files import Entry, Manifest, is_complete, read_manifest
from tridock.contracts.codec import encode
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import HostState
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs import fetch as fetching
from tridock.ops.runs.cluster_runs import Run, choose_run
from tridock.ops.runs.fetch import _PACK_FILES, _unpack, _unpack_all, fetch, fetch_checkpoint
from tridock.remote import Completed


def test_the_twins_own_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked over itself, a log that a rank writes would lose what comes after."""
    (tmp_path / "twin").write_text("node-1 slots=1\n")
    (tmp_path / "twin.yaml").write_text("transport: compose\n")
    states = {"node-1": HostState(HostFacts(1000, 1000, "/home/ada", 0, False), "28.1", None, None)}
    client = NodeClient(Hosts(load_cluster(tmp_path / "twin", project_folder=tmp_path)), states)
    log = tmp_path / "runs" / "a" / "log"
    log.parent.mkdir(parents=True)
    log.write_text("so far\n")
    monkeypatch.chdir(tmp_path)
    assert fetch(client, Run("a", "node-1"), Path("runs"), checkpoints=True) == Path("runs/a")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert log.read_text() == "so far\n"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"pwned") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, len(content) if kind == tarfile.REGTYPE else 0
    return made


RUN = "demo-20261122-110613-14b7"


def past_the_longest_path(runs: Path) -> list[tarfile.TarInfo]:
    """A link whose real path is longer than PATH_MAX, which Python's ``data`` filter takes for one that stays below."""
    deepest = 4090 - len(f"{runs}/.fetch.12345678/node-1.part/{RUN}")
    steps, part, path, made = "abcdefghijklmnop"[: deepest // 248], "d" * 247, RUN, []
    for step in steps:
        made += [member(f"{path}/{part}", tarfile.DIRTYPE), member(f"{path}/{step}", tarfile.SYMTYPE, part)]
        path = f"{path}/{part}"
    last = "/".join(steps) + "/" + "l" * 254
    made.append(member(f"{RUN}/{last}", tarfile.SYMTYPE, "../" * len(steps)))
    made.append(member(f"{RUN}/out", tarfile.SYMTYPE, f"{last}/../../../.."))
    return [*made, member(f"{RUN}/out/outside")]


HOSTILE = {
    "the folder above": [member("../outside")],
    "an absolute name": [member("{outside}")],
    "a way up within": [member(f"{RUN}/../../outside")],
    "through a link to above": [member(f"{RUN}/l", tarfile.SYMTYPE, ".."), member(f"{RUN}/l/../outside")],
    "through a link away": [member(f"{RUN}/l", tarfile.SYMTYPE, "{folder}"), member(f"{RUN}/l/outside")],
    "a hard link away": [member(f"{RUN}/l", tarfile.LNKTYPE, "../outside")],
    "a hard link to an absolute name": [member(f"{RUN}/l", tarfile.LNKTYPE, "{outside}")],
    "a link that leads up": [member(f"{RUN}/l", tarfile.SYMTYPE, "../../outside")],
    "a path longer than the longest": [],
    "another run": [member("other-20261122-110613-14b7/outside")],
    "a file where a folder is": [member(f"{RUN}/a"), member(f"{RUN}/a/b")],
    "a device": [member(f"{RUN}/d", tarfile.CHRTYPE)],
    "a pipe": [member(f"{RUN}/p", tarfile.FIFOTYPE)],
}


@pytest.fixture
def workspace(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace of the only node that is up; its commands run here."""
    own = lab.workspace("node-1")

    def inside(_: str, *argv: str, **__: object) -> Command:
        return Command(tuple(it.replace(run_folder.WORKSPACE, str(own)) for it in argv))

    monkeypatch.setattr(lab.client, "inside", inside)
    monkeypatch.setattr(lab.client, "running", lambda: ("node-1",))
    (own / "runs" / RUN).mkdir(parents=True)
    return own


def everything(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(folder)): "link" if path.is_symlink() else path.read_text("latin-1") for path in paths}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_writes_nothing_outside_of_its_folder(
    lab: Lab, workspace: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, runs, archive = lab.write("outside", b"mine"), lab.project / "runs", tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for entry in HOSTILE[name] or past_the_longest_path(runs):
            places = {"outside": outside, "folder": lab.project}
            given = tarfile.TarInfo(entry.name.format(**places))
            given.type, given.size, given.linkname = entry.type, entry.size, entry.linkname.format(**places)
            made.addfile(given, io.BytesIO(b"pwned"))
    before = everything(tmp_path)
    monkeypatch.setattr(lab.client, "inside", lambda *_, **__: Command.of("cat", str(archive)))
    with suppress(ClusterError):
        fetch(lab.client, Run(RUN, "node-1"), runs)
    assert {path: text for path, text in everything(tmp_path).items() if f"runs/{RUN}/" not in path} == before
    assert [path.name for path in runs.iterdir()] in ([], [RUN])
    for path in runs.rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or path.is_file()


def test_an_archive_that_leads_away_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as made:
        made.addfile(member("../outside"), io.BytesIO(b"pwned"))
    with pytest.raises(ClusterError) as caught:
        list(_unpack("gpu-1", tmp_path / "a.tar.gz", tmp_path / "runs"))
    assert str(caught.value) == (
        "gpu-1: sent an archive that cannot be unpacked; got ../outside: is not taken; send plain files, by names below"
        " the folder; remove what it names from the run's folder there, or try again"
    )


def test_pipes_of_flight_recorders_are_not_fetched(
    lab: Lab, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor named: a rank that was killed on its own leaves one."""
    run = workspace / "runs" / RUN
    (run / ".heartbeat").mkdir(parents=True)
    os.mkfifo(run / ".heartbeat" / "flight-0.pipe")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert "not fetched" not in capsys.readouterr().err
    assert list((lab.project / "runs" / RUN / ".heartbeat").iterdir()) == []


def test_links_of_earlier_fetches_are_not_followed(
    lab: Lab, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder changes between three fetches: each archive alone stays below it."""
    run, here = workspace / "runs" / RUN, lab.project / "runs" / RUN
    (run / "log").write_text("1")
    (run / "p").symlink_to(".")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    (run / "p").unlink()
    (run / "p" / "z").mkdir(parents=True)
    (run / "p" / "z" / "up").symlink_to("../../..")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    (run / "z" / "up").mkdir(parents=True)
    (run / "z" / "up" / "evil.py").write_text("pwned")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert everything(lab.project) == {
        "fabfile.py": "", "hostfiles/lab": "node-1 slots=1\nnode-2 slots=1\n",
        f"runs/{RUN}/log": "1", f"runs/{RUN}/z/up/evil.py": "pwned",
    }  # fmt: skip
    note = f"note: not fetched, since they are links, special files or git's own: {RUN}/p"
    assert capsys.readouterr().err.splitlines() == [note, f"{note}/z/up", f"{note}/z/up"]
    # What an earlier version left, or you made.
    (here / "z" / "up" / "evil.py").unlink()
    (here / "z" / "up").rmdir()
    (here / "z" / "up").symlink_to("../../..")
    with pytest.raises(RequestError, match=rf"^runs/{RUN}/z/up: is a link or a file where a folder belongs; remove it"):
        fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert sorted(path.name for path in lab.project.iterdir()) == ["fabfile.py", "hostfiles", "runs"]


def test_what_git_would_obey_is_left_out(lab: Lab, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's prompt runs git in the folder that you look at, and git the program that a repository names."""
    code, ran = workspace / "runs" / RUN / "code", lab.project / "ran"
    for folder in (code, code / "bare"):
        folder.mkdir()
        subprocess.run(["git", "init", "--quiet", *(["--bare"] if folder != code else []), folder], check=True)
        for monitored in ("core.fsmonitor", "core.worktree"):
            value = f"touch {ran}; false" if monitored == "core.fsmonitor" else "."
            subprocess.run(["git", "-C", folder, "config", monitored, value], check=True)
    (code / "train.py").touch()
    subprocess.run(["git", "-C", code, "config", "--unset", "core.worktree"], check=True)
    subprocess.run(["git", "-C", code, "status"], check=True, capture_output=True)
    assert ran.exists()
    ran.unlink()
    here = fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    for folder in (here / "code", here / "code" / "bare"):
        subprocess.run(["git", "-C", folder, "status"], check=False, capture_output=True)
    assert not ran.exists()
    assert (here / "code" / "train.py").exists()
    assert f"git's own: {RUN}/code/.git, " in capsys.readouterr().err


def test_what_a_run_holds_arrives(lab: Lab, workspace: Path) -> None:
    run = workspace / "runs" / RUN
    (run / "logs").mkdir()
    (run / "empty").mkdir()
    (run / "logs" / "rank-0.log").write_text("a line\n")
    (run / "launch.sh").write_text("exec true\n")
    (run / "launch.sh").chmod(0o755)
    os.utime(run / "launch.sh", (1e9, 1e9))
    os.link(run / "launch.sh", run / "linked.sh")
    here = fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert here == Path("runs", RUN)
    assert {path.name for path in here.iterdir()} == {"logs", "empty", "launch.sh", "linked.sh"}
    assert [(here / name).read_text() for name in ("launch.sh", "linked.sh")] == ["exec true\n"] * 2
    status = (here / "launch.sh").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o755, 1e9)
    assert (here / "logs" / "rank-0.log").stat().st_mode & 0o777 == 0o644


def test_files_of_a_tokenizer_that_are_links_arrive(tmp_path: Path) -> None:
    """As those in the cache of Hugging Face are."""
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "blob").write_text("{}")
    for name in ("tokenizer.json", "additional_chat_templates/tools.jinja"):
        (there / name).symlink_to(tmp_path / "blob")
    names = ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates")
    packed = subprocess.run(["sh", "-c", _PACK_FILES, "sh", there, *names], check=True, capture_output=True).stdout
    (tmp_path / "archive.tar.gz").write_bytes(packed)
    assert list(_unpack("n", tmp_path / "archive.tar.gz", here)) == []
    found = {str(file.relative_to(here)): file.read_text() for file in here.rglob("*") if file.is_file()}
    assert found == {"tokenizer.json": "{}", "additional_chat_templates/tools.jinja": "{}"}


def test_a_run_id_that_leads_elsewhere_moves_nothing(
    lab: Lab, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = lab.write("data/mine", b"mine")
    reported = RunInfo(RUN, RunState.LOST, None, "20261122-110613", None, "demo", (), None, None, None)
    answer = encode([reported]).replace(RUN, "../../../data").encode()
    monkeypatch.setattr(lab.client, "node_verb", lambda *_, **__: Completed(0, answer, b""))
    with pytest.raises(ClusterError) as caught:
        fetch(lab.client, choose_run(lab.client, None, active=False), Path("runs"))
    assert str(caught.value) == (
        "node-1: its answer to runs is refused; got '../../../data' is no run id; do not use this host before you know"
        " why: a node of Tridock's does not answer so"
    )
    assert mine.read_bytes() == b"mine"
    assert not (lab.project / "runs").exists()


def _archive_of(folder: Path, run: Path) -> Path:
    path = folder / f"{run.parent.name}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(run, run.name)
    return path


def _parts(folder: Path) -> dict[str, Path]:
    """Archives of two nodes without a common disk, each with its part of a checkpoint."""
    names = {"node-1": ["__0_0.distcp", "tridock.json"], "node-2": ["__1_0.distcp", "tridock.json"]}
    for node, own in names.items():
        checkpoint = folder / node / RUN / "checkpoints" / "iter_0000004"
        checkpoint.mkdir(parents=True)
        for name in own:
            (checkpoint / name).write_text(name)
        here = {name: Entry.of(checkpoint / name) for name in own}
        (other,) = {"__0_0.distcp", "__1_0.distcp"} - set(own)
        elsewhere = {other: Entry(len(other), hashlib.sha256(other.encode()).hexdigest())}
        (checkpoint / "files.json").write_bytes(Manifest(here, elsewhere).to_bytes())
    return {node: _archive_of(folder, folder / node / RUN) for node in names}


def test_a_checkpoint_is_brought_together_from_all_nodes(tmp_path: Path) -> None:
    archives = _parts(tmp_path)
    _unpack_all(Run(RUN, "node-1"), archives, tmp_path / "all")
    checkpoint = tmp_path / "all" / RUN / "checkpoints" / "iter_0000004"
    manifest = read_manifest(checkpoint)
    assert isinstance(manifest, Manifest)
    assert (sorted(manifest.here), manifest.elsewhere) == (["__0_0.distcp", "__1_0.distcp", "tridock.json"], {})
    assert is_complete(checkpoint)
    # Of one node, the rest is still missing.
    _unpack_all(Run(RUN, "node-1"), {"node-1": archives["node-1"]}, tmp_path / "one")
    manifest = read_manifest(tmp_path / "one" / RUN / "checkpoints" / "iter_0000004")
    assert isinstance(manifest, Manifest)
    assert list(manifest.elsewhere) == ["__1_0.distcp"]


def test_a_checkpoint_that_does_not_arrive_whole_is_refused(tmp_path: Path) -> None:
    _parts(tmp_path)
    damaged = tmp_path / "node-2" / RUN / "checkpoints" / "iter_0000004" / "__1_0.distcp"
    damaged.write_text("__1_0.distXp")
    archives = {node: _archive_of(tmp_path, tmp_path / node / RUN) for node in ("node-1", "node-2")}
    with pytest.raises(ClusterError, match=r"__1_0\.distcp: has changed since it was saved"):
        _unpack_all(Run(RUN, "node-1"), archives, tmp_path / "all")


# ---- one checkpoint ------------------------------------------------------------------------------


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
    assert everything(nodes.project / "runs") == {}


def test_a_checkpoint_in_a_folder_of_its_own(nodes: Lab) -> None:
    fields = {**FIELDS, "train": {"train_iters": 2, "checkpoint_folder": "ckpt"}}
    write(nodes, "node-1", f"runs/{RUN}/experiment.yaml", json.dumps(fields).encode())
    save(nodes, "ckpt")
    shutil.rmtree(nodes.workspace("node-1") / f"runs/{RUN}/checkpoints")
    assert bring(nodes) == 2
    assert is_complete(nodes.project / "runs" / RUN / "checkpoints/iter_0000002")


def test_a_checkpoint_that_the_run_removes_meanwhile(nodes: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    download = fetching._download_all

    def late(client: NodeClient, commands: Any, folder: Path, suffix: str, *given: Any) -> dict[str, Path]:
        for node in nodes.hosts:
            if suffix == ".tar":
                shutil.rmtree(nodes.workspace(node) / f"runs/{RUN}/checkpoints/iter_0000002")
        return download(client, commands, folder, suffix, *given)

    monkeypatch.setattr(fetching, "_download_all", late)
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

        monkeypatch.setattr(fetching, "write_atomic", fail)
    wanted = {"damage": ClusterError, "disk": ClusterError, "ctrl-c": KeyboardInterrupt}[fault]
    with pytest.raises(wanted) as caught:
        bring(nodes)
    if fault == "disk":
        todo = "free space there, or make it writable, then try again"
        assert str(caught.value) == f"runs/{RUN}: could not be written; got No space left on device; {todo}"
    assert [*(nodes.project / "runs").iterdir()] == []
