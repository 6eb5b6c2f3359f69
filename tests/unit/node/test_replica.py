"""What a node keeps on its own disk to take over a run: its vote, and copies of the head's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from queue import Queue
from unittest import mock

import pytest

from tridock.contracts.checkpoints import read_copied, write_copied
from tridock.contracts.lease import Lease, record
from tridock.contracts.node_answers import ReplicaStatus
from tridock.contracts.run_folder import write_atomic
from tridock.contracts.supervision import Supervision
from tridock.contracts.vote import LEASE_S, Vote, VoteRequest
from tridock.node.agent import voter
from tridock.node.agent.replica import Replica, adopt, copy_of, status
from tridock.node.agent.voter import answer, vote_of
from tridock.node.supervisor import replication


def checkpoint(folder: Path, iteration: int, **files: str) -> bytes:
    """Writes a checkpoint whose hashes are its contents; returns its manifest."""
    path = folder / f"iter_{iteration:07d}"
    for name, content in files.items():
        write_atomic(path / name, content.encode())
    entries = {name: {"bytes": len(content), "sha256": content} for name, content in files.items()}
    manifest = json.dumps({"iteration": iteration, "files": entries}).encode()
    write_atomic(path / "files.json", manifest)
    return manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run's folder on a node that has rank 1's part of two checkpoints, and the head's of the first."""
    supervision = Supervision("a", {}, (), 1, 1.0, checkpoints=str(tmp_path / "checkpoints"))
    (tmp_path / "supervision.json").write_text(supervision.to_json())
    for iteration in (20, 40):
        checkpoint(tmp_path / "checkpoints", iteration, common="c", rank_1=f"part of {iteration}")
    staged = tmp_path / ".replica" / "checkpoints"
    checkpoint(staged, 20, common="c", rank_0="part")
    (staged / "iter_0000020" / "common").unlink()
    write_atomic(tmp_path / ".replica" / "copy.json", Replica(3, 20, "iter_0000020").to_bytes())
    write_atomic(tmp_path / ".replica" / "files" / "events.jsonl", b'{"event": "run_started"}\n')
    write_atomic(tmp_path / ".replica" / "files" / "metrics.jsonl", b'{"iteration": 20}\n')
    (tmp_path / "events.jsonl").write_text('{"event": "head_lost"}\n')
    return tmp_path


def test_only_what_a_node_lacks_is_sent(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    head = tmp_path_factory.mktemp("head")
    manifest = checkpoint(head, 40, common="c", rank_0="part of the head")
    (folder / ".replica" / "checkpoints" / "iter_0000010").mkdir()
    assert status(folder, 3, "iter_0000040", manifest) == ReplicaStatus(False, ("rank_0",))
    assert [path.name for path in (folder / ".replica" / "checkpoints").iterdir()] == ["iter_0000020"]
    assert status(folder, 3, "", b"") == ReplicaStatus(False, ())
    record(folder, 3, Lease("a", 0.0))
    assert status(folder, 3, "iter_0000040", manifest).shares


def test_the_head_s_part_completes_a_checkpoint_and_later_ones_are_set_aside(folder: Path) -> None:
    assert copy_of(folder) == (3, 20)
    adopt(folder, (3, 20))
    found = folder / "checkpoints" / "iter_0000020"
    entries = json.loads((found / "files.json").read_bytes())["files"]
    assert entries.keys() == {"common", "rank_0", "rank_1"}
    assert all((found / name).read_text() == entry["sha256"] for name, entry in entries.items())
    assert sorted(path.name for path in found.parent.iterdir()) == ["iter_0000020", "iter_0000040.set-aside-1"]
    assert (folder / "events.jsonl").read_text() == '{"event": "run_started"}\n{"event": "head_lost"}\n'
    assert (folder / "metrics.jsonl").read_text() == '{"iteration": 20}\n'


def test_a_later_checkpoint_that_is_whole_without_the_head_stays(folder: Path) -> None:
    checkpoint(folder / "checkpoints", 60, common="c", rank_0="part", rank_1="part")
    adopt(folder, (3, 20))
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"iter_0000020", "iter_0000040.set-aside-1", "iter_0000060"}


def test_a_checkpoint_that_a_copy_needs_is_kept_until_the_next_copy_is_complete(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that a supervisor before this one had copied."""
    kept: Queue[set[int]] = Queue()
    supervision = Supervision("a", {}, ("b",), 1, 1.0, checkpoints=str(folder / "checkpoints"), replication_factor=2)
    supervision = replace(supervision, voters=("a", "b", "c"))
    monkeypatch.setattr(replication, "_LOOK_S", 0.01)
    monkeypatch.setattr(replication, "send", lambda *_: kept.put(read_copied(folder / "checkpoints")))
    monkeypatch.setattr(replication.Replication, "_ask", lambda *_: ReplicaStatus(False, ("common",)))
    write_copied(folder / "checkpoints", (20,))
    copies = replication.Replication(folder, supervision, mock.Mock(token=3, prepared_at=0.0))
    try:
        assert kept.get(timeout=60) == {20, 40}
        for iteration in (60, 80):
            checkpoint(folder / "checkpoints", iteration, common="c")
            assert kept.get(timeout=60) == {iteration - 20, iteration}
    finally:
        copies.close()


def test_the_folder_itself_is_newer_than_any_copy(folder: Path) -> None:
    record(folder, 4, Lease("b", 0.0))
    assert copy_of(folder) > (3, 20)
    adopt(folder, copy_of(folder))
    assert (folder / "events.jsonl").read_text() == '{"event": "head_lost"}\n'


def test_a_vote_outlives_the_voter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses others until the lease expires; after its machine has restarted it begins to count again."""
    now, boot = [1000.0], ["first"]
    monkeypatch.setattr(voter, "clock", lambda: now[0])
    monkeypatch.setattr(voter, "_boot", lambda: boot[0])

    def ask(token: int, holder: str) -> bool:
        return answer(tmp_path, "n", VoteRequest(token, holder, holder, (1, 0))).granted

    assert ask(1, "a")
    now[0] += 10.0
    assert ask(1, "a")
    now[0] += LEASE_S - 1.0
    assert not ask(2, "b")
    now[0], boot[0] = 5.0, "second"
    assert not ask(2, "b")
    assert vote_of(tmp_path, "n") == Vote(1, "a", "a", (1, 0), granted_at=5.0)
    now[0] += LEASE_S
    assert ask(2, "b")
