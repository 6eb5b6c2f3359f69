"""Failover asks each spare whether it is free, and reserves those that the new layout uses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.ops.test_replan import V115, ZERO, a_run
from tridock.contracts import run_folder
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.failover import move

FREE = {"busy": [], "missing": [], "checkpoint": None}

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
