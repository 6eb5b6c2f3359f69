"""What only other nodes have of the checkpoint that a run continues from comes to the run's nodes before it starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.ops.conftest import Lab, program
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.checkpoint_files import (
    Delivery,
    Entry,
    Illness,
    Manifest,
    Quantity,
    damage,
    is_complete,
    read_manifest,
)
from tridock.contracts.codec import encode
from tridock.errors import ClusterError
from tridock.ops.hosts import client
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.checkpoint_to_load import lacking_files

LOAD = "runs/demo-20261122-110613-14b7/checkpoints"
# rsync's ssh to another node, whose workspace is another folder here.
SSH = """while true; do case $1 in node-?) break;; esac; shift; done
node=$1; shift
exec sh -c "$(printf %s "$*" | sed "s#/node-[0-9]/#/$node/#")"
"""
PLACE = f"{LOAD}/iter_0000002"
Save = Callable[..., None]


@pytest.fixture
def run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> NodeClient:
    """A run on node-1 alone, whose cluster has a node-2 as well."""

    def inside(node: str, *argv: str, stdin: bytes | None = None) -> Command:
        own = {run_folder.WORKSPACE: str(lab.workspace(node)), run_folder.PYTHON: sys.executable}
        words = [own.get(word) or word.replace(run_folder.WORKSPACE, own[run_folder.WORKSPACE]) for word in argv]
        return Command(tuple(words), stdin=stdin)

    program(lab.bin / "ssh", SSH)
    monkeypatch.setattr(NodeClient, "inside", lambda _, *given, **named: inside(*given, **named))
    monkeypatch.setattr(client, "connect", lambda cluster, **_: {it: lab.hosts[it] for it in cluster.slots})
    cluster = replace(lab.hosts.cluster, slots={"node-1": (0,)})
    return NodeClient.of(Hosts(cluster, {"node-1": lab.hosts["node-1"]}))


def experiment(load: str) -> Any:
    return SimpleNamespace(train=SimpleNamespace(load=load, pretrained=None))


@pytest.fixture
def save(lab: Lab) -> Save:
    def save(iteration: int, on: dict[str, list[str]], ill: Illness | None = None) -> None:
        """Files of a checkpoint, by node; each node lists its own, and the others'."""
        entries = {}
        for node, names in on.items():
            for name in names:
                path = lab.workspace(node) / LOAD / f"iter_{iteration:07d}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(f"{name} {iteration}".encode() * 1000)
                entries[name] = Entry.of(path)
        for node, names in on.items():
            here = {name: entries[name] for name in names}
            rest = {name: it for name, it in entries.items() if name not in here}
            (lab.workspace(node) / LOAD / f"iter_{iteration:07d}/files.json").write_bytes(
                Manifest(here, rest, ill).to_bytes()
            )

    return save


def bring(run: NodeClient, load: str = LOAD) -> bool:
    """Whether there was anything to bring, which is there now."""
    found = lacking_files(run, experiment(load))
    if found is not None:
        found()
    return found is not None


def test_each_file_comes_from_a_node_that_has_it_and_is_listed(
    lab: Lab, run: NodeClient, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save(1, {"node-1": ["a.pt", "b.pt"]})
    save(2, {"node-1": ["a.pt"], "node-2": ["deep/er/b #1.pt", "c.pt"]})
    assert bring(run)
    said = "iteration 2: 2 files, 23 kB, of other nodes than the run's are needed"
    assert capsys.readouterr().err == f"{LOAD}: {said}\n"
    here = lab.workspace("node-1") / PLACE
    manifest = read_manifest(here)
    assert isinstance(manifest, Manifest)
    assert (sorted(manifest.here), manifest.elsewhere) == (["a.pt", "c.pt", "deep/er/b #1.pt"], {})
    assert is_complete(here)
    assert not any(damage(here, manifest.here, manifest.here, read=True))
    assert not bring(run)


def test_a_node_that_has_nothing_lists_what_it_lacks(lab: Lab, run: NodeClient, save: Save) -> None:
    save(2, {"node-2": ["a.pt", "b.pt"]}, Illness(Quantity.LOSS, 2))
    assert not bring(run)  # nothing continues from one in ill health
    assert bring(run, PLACE)  # unless it is named
    here = lab.workspace("node-1") / PLACE
    assert is_complete(here)
    manifest = read_manifest(here)
    assert isinstance(manifest, Manifest)
    assert manifest.ill == Illness(Quantity.LOSS, 2)


def test_what_no_node_has_or_the_run_has_itself_is_not_brought(run: NodeClient, save: Save) -> None:
    assert not bring(run)
    save(4, {"node-1": ["a.pt"], "node-2": ["b.pt"], "node-3": ["c.pt"]})  # which is not in the hostfile any more
    assert not bring(run)
    save(3, {"node-1": ["a.pt"], "node-2": ["a.pt"]})
    assert not bring(run)


@pytest.mark.parametrize("fault", ["damage", "gone", "ssh", "disk"])
def test_a_checkpoint_that_does_not_arrive_whole_is_not_listed(
    lab: Lab, run: NodeClient, save: Save, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(2, {"node-1": ["a.pt"], "node-2": ["b.pt", "c.pt"]})
    before = (lab.workspace("node-1") / PLACE / "files.json").read_bytes()
    bad = lab.workspace("node-2") / PLACE / "b.pt"
    if fault == "damage":
        bad.write_bytes(b"x" * bad.stat().st_size)
    if fault == "gone":
        bad.unlink()
    if fault == "ssh":
        program(lab.bin / "ssh", "echo 'ssh: connect to host node-2 port 2222: No route to host' >&2; exit 255")
    if fault == "disk":
        program(lab.bin / "rsync", "echo 'rsync: write failed: No space left on device (28)' >&2; exit 11")
    with pytest.raises(ClusterError) as caught:
        bring(run)
    where = f"node-1: `get its part of iter_0000002` failed with exit code 4; got {lab.workspace('node-1') / PLACE}/"
    words = {
        "damage": "b.pt from node-2: has changed since it was saved; got sha256 ",
        "gone": "b.pt from node-2: is missing; got rsync: [sender] link_stat ",
        "ssh": "b.pt from node-2: is missing; got ssh: connect to host node-2 port 2222: No route to host",
        "disk": "b.pt from node-2: is missing; got rsync: write failed: No space left on device (28)",
    }
    assert str(caught.value).startswith(where + words[fault])
    assert (lab.workspace("node-1") / PLACE / "files.json").read_bytes() == before


def receive(lab: Lab, entry: Entry) -> subprocess.CompletedProcess[str]:
    """Node-1 gets a.pt from node-2, or else from node-3."""
    request = encode(Delivery({"a.pt": entry}, {"a.pt": ("node-2", "node-3")}, {}, None))
    argv = (sys.executable, "-m", "tridock.node", "receive-checkpoint", str(lab.workspace("node-1") / PLACE))
    return subprocess.run(argv, input=request, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("fault", ["damage", "gone", "ssh"])
def test_another_nodes_copy_takes_the_place_of_one_that_does_not_arrive_whole(lab: Lab, save: Save, fault: str) -> None:
    program(lab.bin / "ssh", 'case "$*" in *node-2*) exit 255;; esac\n' * (fault == "ssh") + SSH)
    save(2, {"node-2": ["a.pt"]})
    save(2, {"node-3": ["a.pt"]})
    bad = lab.workspace("node-2") / PLACE / "a.pt"
    entry = Entry.of(bad)
    bad.unlink() if fault == "gone" else bad.write_bytes(b"x" * entry.size) if fault == "damage" else None
    done = receive(lab, entry)
    assert (done.returncode, done.stderr) == (0, "")
    assert sum(map(int, done.stdout.split())) == entry.size * (2 if fault == "damage" else 1)
    assert is_complete(lab.workspace("node-1") / PLACE)


def test_a_checkpoint_that_the_disk_has_no_space_for_is_not_begun(lab: Lab) -> None:
    done = receive(lab, Entry(10**18, ""))
    here = lab.workspace("node-1") / PLACE
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"{here}: has no space for 1000000.0 TB of a checkpoint; got ")
    assert [*here.iterdir()] == []


def test_another_save_of_the_same_iteration_is_left_alone(lab: Lab, run: NodeClient, save: Save) -> None:
    """On a node that was away meanwhile."""
    save(2, {"node-2": ["a.pt", "b.pt"]})
    files = [*(lab.workspace("node-2") / PLACE).glob("*.pt")]
    old = {path: b"old " + path.read_bytes() for path in files}
    save(2, {"node-1": ["a.pt", "b.pt"]})
    for path, content in old.items():
        path.write_bytes(content)
    here = {path.name: Entry.of(path) for path in files}
    (files[0].parent / "files.json").write_bytes(Manifest(here).to_bytes())
    assert not bring(run)
    # Nor does what this node lacks of its own save come from there.
    own = read_manifest(lab.workspace("node-1") / PLACE)
    assert isinstance(own, Manifest)
    part = Manifest({"a.pt": own.here["a.pt"]}, {"b.pt": own.here["b.pt"]})
    (lab.workspace("node-1") / PLACE / "files.json").write_bytes(part.to_bytes())
    assert not bring(run)
    done = receive(lab, here["a.pt"])
    assert (done.returncode, "a.pt: belongs to a different save of this iteration; got " in done.stderr) == (4, True)


def test_a_node_that_is_not_the_runs_and_cannot_tell_is_left_out_with_a_warning(
    lab: Lab, run: NodeClient, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save(2, {"node-2": ["a.pt"]})
    fails = 'echo "tar: files.json: Cannot read: Input/output error" >&2; exit 2'
    program(lab.bin / "tar", f'case "$PWD" in */node-2/*) {fails};; esac\nexec /bin/tar "$@"')
    assert not bring(run)
    assert capsys.readouterr().err.startswith("warning: node-2: `")
    lab.up.remove("node-2")
    assert not bring(run)
    assert capsys.readouterr().err == ""
