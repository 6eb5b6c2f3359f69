"""Failover asks each spare whether it is free, and reserves those that the new layout uses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.test_replan import V115, ZERO, a_run
from tridock.contracts import run_folder
from tridock.contracts.lease import HeldLease
from tridock.contracts.supervision import Supervision
from tridock.experiment.command import CommandExperiment
from tridock.launchers.run import Run, make_bundle
from tridock.launchers.ssh import Ssh
from tridock.node.supervisor import failover, run_supervisor
from tridock.node.supervisor.failover import move, spare_status
from tridock.node.supervisor.run_supervisor import RunSupervisor

FREE = {"busy": [], "missing": []}

# Every node is a folder beside it: its answers to spare-status without and with --reserve, and the files it received.
SSH = """#!/bin/sh
set -eu
for word; do before=${node:-}; node=${last:-}; last=$word; done
home="${0%/*}/$node"; mkdir -p "$home"; echo "$last" >>"$home/asked"
case $last in
*' receive-files '*) exec tar -x -C "$home" ;;
*--reserve*) cat "$home/reserved" ;;
*) cat "$home/ready" ;;
esac
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "nodes"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def says(nodes: Path, node: str, ready: dict[str, object], reserved: dict[str, object]) -> None:
    (nodes / node).mkdir()
    (nodes / node / "ready").write_text(json.dumps(FREE | ready))
    (nodes / node / "reserved").write_text(json.dumps(FREE | reserved))


def asked(nodes: Path, node: str) -> list[str]:
    """The verbs of ``tridock.node``, in order."""
    lines = (nodes / node / "asked").read_text().splitlines()
    return [line.split(" tridock.node ")[1].split(" /")[0] for line in lines]


def supervision_of(folder: Path) -> Supervision:
    return Supervision.from_json((folder / run_folder.SUPERVISION).read_text())


def test_a_spare_needs_all_files_of_the_data_in_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's manifest has no hash of the tokens, but the size of every file."""
    monkeypatch.setattr(failover, "busy_with", lambda *_, **__: ())
    folder = a_run(tmp_path, **ZERO)
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    for name, content in (("t.bin", b"12"), ("t.idx", b"1")):
        (data / name).write_bytes(content)
    sizes = {"data_sha256": {"data/t.idx": "aa"}, "data_bytes": {"data/t.bin": 2, "data/t.idx": 1}}
    manifest = folder / run_folder.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | sizes))
    assert spare_status(folder).missing == ()
    (data / "t.bin").write_bytes(b"1")
    assert spare_status(folder).missing == (str(data / "t.bin"),)
    (data / "t.bin").unlink()
    assert spare_status(folder).missing == (str(data / "t.bin"),)


def test_a_spare_is_reserved_before_it_gets_the_runs_files(tmp_path: Path, nodes: Path) -> None:
    folder = a_run(tmp_path, **ZERO)
    for node in ("node-4", "node-5"):
        says(nodes, node, {}, {})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert moved.reason == "node-5 takes the place of node-2"
    assert moved.supervision is not None
    assert moved.supervision.ranks["node-5"] == (2, 3)
    assert asked(nodes, "node-5") == ["spare-status", "spare-status --reserve", "receive-files"]
    assert asked(nodes, "node-4") == ["spare-status"]  # which is too small to be wanted
    assert (nodes / "node-5" / run_folder.SUPERVISION).read_bytes() == (folder / run_folder.SUPERVISION).read_bytes()


def test_a_spare_that_another_run_was_faster_to_reserve_is_done_without(tmp_path: Path, nodes: Path) -> None:
    folder = a_run(tmp_path, **ZERO)
    says(nodes, "node-4", {"busy": ["earlier-run"]}, {})
    says(nodes, "node-5", {}, {"busy": ["other-run"]})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert moved.reason == (
        "without node-2 it continues as TP1 PP1 DP4 (it was TP1 PP1 DP6) on node-1, node-3; "
        "global batch 24 as before, in 3 micro-batches a replica"
        "; spare node-4: is busy with earlier-run; spare node-5: is busy with other-run"
    )
    assert asked(nodes, "node-5") == ["spare-status", "spare-status --reserve"]
    assert asked(nodes, "node-3") == ["receive-files"]
    (event,) = [json.loads(line) for line in (folder / run_folder.EVENTS).read_text().splitlines()]
    assert (event["event"], event["nodes"], event["reason"]) == ("run_moved", ["node-1", "node-3"], moved.reason)


def test_where_nothing_continues_the_runs_files_stay_as_they_were(tmp_path: Path, nodes: Path) -> None:
    folder = a_run(tmp_path, **V115)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    says(nodes, "node-4", {}, {})
    says(nodes, "node-5", {}, {"busy": ["other-run"]})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=False)
    assert moved.supervision is None
    assert moved.reason.endswith("; spare node-5: is busy with other-run")
    assert asked(nodes, "node-5") == ["spare-status", "spare-status --reserve"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ---- your own program ----

RUN_ID = "train-20260102-030405-abcd"
TORCHRUN = ("torchrun", "train.py")


def a_program(workspace: Path, command: tuple[str, ...] = TORCHRUN, **changes: Any) -> Path:
    slots = changes.get("slots", {"node-1": (0, 1), "node-2": (0, 1)})
    spares = {"node-3": (0,), "node-4": (0, 1, 2)}
    experiment = CommandExperiment(name="train", engine="command", command=command)
    run = Run(experiment, slots, RUN_ID, master_addr="node-1", workspace=str(workspace), spares=spares)
    folder = workspace / "runs" / RUN_ID
    folder.mkdir(parents=True)
    for name, content in make_bundle(run, Ssh()).files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_spare_with_its_slots_takes_the_place_of_a_lost_node(tmp_path: Path, nodes: Path) -> None:
    folder = a_program(tmp_path)
    says(nodes, "node-3", {}, {})
    says(nodes, "node-4", {}, {})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert moved.reason == "node-4 takes the place of node-2"
    assert moved.supervision == supervision_of(folder)
    assert dict(moved.supervision.ranks) == {"node-1": (0, 1), "node-4": (2, 3)}
    assert (moved.supervision.remote, dict(moved.supervision.spares)) == (("node-4",), {"node-3": (0,)})
    assert (folder / "hostfile").read_text() == "node-1 slots=2\nnode-4 slots=2\n"
    assert [rank["node"] for rank in json.loads((folder / "plan.json").read_text())["ranks"]] == [
        *("node-1", "node-1", "node-4", "node-4")
    ]
    assert asked(nodes, "node-4") == ["spare-status", "spare-status --reserve", "receive-files"]
    assert "node-2" in (folder / "before-1" / run_folder.HOSTFILE).read_text()
    assert "node-2" not in "".join(
        path.read_text() for path in folder.glob("*") if path.is_file() and "events" not in path.name
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"slots": {"node-1": (0, 1), "node-2": (0, 1, 2, 3)}},
            "no spare has the slots of node-2, 0, 1, 2, 3; got node-3, node-4;"
            " bring node-2 back, or add a spare to the cluster's settings",
        ),
        (
            {"command": ("deepspeed", "t.py"), "slots": {"node-1": (1, 2), "node-2": (1, 2)}},
            "names slots of node-2 in its command; got --include; bring node-2 back, or use its first slots",
        ),
    ],
)
def test_why_no_spare_can(tmp_path: Path, nodes: Path, changes: dict[str, Any], what: str) -> None:
    folder = a_program(tmp_path, **changes)
    for node in ("node-3", "node-4"):
        says(nodes, node, {}, {})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert (moved.supervision, moved.reason) == (None, f"{RUN_ID}: {what}")


def test_a_spare_that_has_another_version_of_tridock_by_now_is_passed_over(tmp_path: Path, nodes: Path) -> None:
    """`tridock up` replaces a node without a run while the run continues."""
    folder = a_program(tmp_path)
    says(nodes, "node-3", {"another": "field"}, {})
    says(nodes, "node-4", {"another": "field"}, {})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert moved.supervision is None
    assert moved.reason.endswith("; spare node-4: its image has another version of Tridock")


def test_a_spare_has_as_long_to_answer_as_the_node_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host starts its node agent late."""
    (tmp_path / "supervision.json").touch()
    lease = HeldLease.first(tmp_path, "a", 0.0)
    supervision = Supervision("a", {"a": (0,), "b": (1,)}, ("b",), 20000, 30.0, node_timeout_s=60.0)
    supervisor: Any = RunSupervisor(tmp_path, supervision, lease)
    now, moved = [0.0], list[float]()
    monkeypatch.setattr(run_supervisor.time, "monotonic", lambda: now[0])

    def obstacle() -> str | None:
        now[0] += 8.0
        supervisor._silent = ["b"] if not moved else ["spare"]
        return None if moved and now[0] > moved[0] + 40.0 else "does not answer"

    monkeypatch.setattr(supervisor, "_obstacle", obstacle)
    monkeypatch.setattr(supervisor, "_move", lambda: moved.append(now[0]))
    monkeypatch.setattr(supervisor._agents, "poll", lambda _: None)
    assert supervisor._wait_until_fit() is None
    assert len(moved) == 1
