"""Nodes that do not share the run's folder: who supervises is voted on. Real processes, without ssh, on this machine.

Each node has a workspace of its own; the stand-in for ssh goes to the other node's, unless one of the two is cut off.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, rank_environment
from tests.distributed.supervised import Run
from tridock.contracts import run_folder
from tridock.contracts.run_state import is_supervised
from tridock.contracts.supervision import Reach, Supervision
from tridock.node.agent.processes import find_processes, stop_processes
from tridock.node.agent.voter import vote_of
from tridock.node.supervisor.voted_lease import VotedLease

pytestmark = pytest.mark.distributed

NODES = ("here", "b", "c")
SSH = """
base=$1 to={node}; shift
for argument in "$@"; do case $argument in "$base"/*/runs/*) from=${argument#"$base"/}; from=${from%%/*}; esac; done
cut() { [ -e "$base/$1.cut" ]; }
if [ "${TRIDOCK_NODE:-here}" != "$to" ] && { cut "${TRIDOCK_NODE:-here}" || cut "$to"; }; then exit 255; fi
for argument; do set -- "$@" "${argument/#"$base"\\/*\\/runs\\//$base/$to/runs/}"; shift; done
set -o pipefail
cat | TRIDOCK_NODE=$to setsid -w "$@" | cat
"""
"""The relays have a process group of their own: when it is killed, both ends see the connection end."""
PATIENCE = 120.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Run]]:
    """The run as each node sees it. All ranks are on the head; the others only watch, vote and may take over."""
    reach = Reach(("bash", "-c", SSH, "ssh", str(tmp_path)), python=sys.executable)
    fields = {"remote": NODES[1:], "reach": reach, "max_restarts": 3, "replication_factor": 2, "voters": NODES}
    made = {"here": Run.make(tmp_path / "here", **fields)}
    head = made["here"].folder
    supervision = Supervision.from_json((head / run_folder.SUPERVISION).read_text())
    for node in NODES[1:]:
        made[node] = Run(tmp_path / node / "runs" / head.name)
        made[node].folder.mkdir(parents=True)
        (made[node].folder / "logs").mkdir()
        own = replace(supervision, checkpoints=str(made[node].folder / "checkpoints"))
        (made[node].folder / run_folder.SUPERVISION).write_text(own.to_json())
    yield made
    for run in made.values():
        run.kill("start", "agent")
        stop_processes(run.folder.name, grace_s=0.0)


def start(run: Run) -> None:
    arguments = [sys.executable, "-m", "tridock.node", "start", str(run.folder)]
    env = rank_environment() | {"TRIDOCK_NODE": "here"}
    done = subprocess.run(arguments, env=env, cwd=ROOT, check=False, timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + (run.folder / run_folder.LAUNCHER_LOG).read_text()


def connections(base: Path) -> list[int]:
    """The process groups of the stand-ins for ssh."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            argv = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if argv[3:5] == [b"ssh", str(base).encode()] and os.getpgid(int(entry.name)) == int(entry.name):
                found.append(int(entry.name))
    return found


def supervised(nodes: dict[str, Run]) -> list[str]:
    return [node for node, run in nodes.items() if is_supervised(run.folder)]


def test_a_head_that_is_cut_off_ends_and_one_other_node_takes_over(nodes: dict[str, Run], tmp_path: Path) -> None:
    head, successor = nodes["here"], nodes["b"]
    start(head)
    head.train(beyond=22)
    copied = successor.folder / ".replica" / "copy.json"
    head.until(lambda: copied.exists() and json.loads(copied.read_text())["iteration"] >= 20)
    (tmp_path / "here.cut").touch()
    for group in connections(tmp_path):
        os.killpg(group, signal.SIGKILL)
    seen = set[tuple[str, ...]]()
    head.until(lambda: seen.add(tuple(supervised(nodes))) or successor.events("taken_over"), PATIENCE)
    assert all(len(one) <= 1 for one in seen), seen
    assert "got no answer from a majority of here, b, c for 12 s" in head.said()[-1]
    assert supervised(nodes) == ["b"]
    (taken,) = successor.events("taken_over")
    assert (taken["node"], taken["previous"]) == ("b", "here")
    assert taken["token"] > 1
    head.until(lambda: find_processes(head.folder.name) == [])
    adopted = [path.name for path in (successor.folder / "checkpoints").iterdir()]
    assert adopted == [json.loads(copied.read_text())["checkpoint"]]


def test_a_head_that_finds_no_majority_for_a_while_supervises_again(nodes: dict[str, Run], tmp_path: Path) -> None:
    """The only other node with a copy does not come back: the head itself is elected once more."""
    head = nodes["here"]
    start(head)
    head.train(beyond=22)
    for node in NODES[1:]:
        (tmp_path / f"{node}.cut").touch()
    for group in connections(tmp_path):
        os.killpg(group, signal.SIGKILL)
    head.until(lambda: supervised(nodes) == [], PATIENCE)
    assert "got no answer from a majority of here, b, c for 12 s" in head.said()[-1]
    assert find_processes(head.folder.name) == []
    (tmp_path / "c.cut").unlink()
    head.until(lambda: head.events("taken_over"), PATIENCE)
    (taken,) = head.events("taken_over")
    assert (taken["node"], taken["previous"]) == ("here", "here")
    assert supervised(nodes) == ["here"]


def test_a_run_that_has_ended_is_taken_over_by_nobody(nodes: dict[str, Run]) -> None:
    head = nodes["here"]
    for name in (run_folder.LAUNCH_SCRIPT, run_folder.RESUME_SCRIPT):
        path = head.folder / name
        path.write_text(path.read_text().replace(" 1000000 ", " 40 "))
    start(head)
    assert head.end() == 0
    head.until(lambda: all(vote_of(run.folder, node).is_over for node, run in nodes.items()))
    head.until(lambda: supervised(nodes) == [])
    supervision = Supervision.from_json((head.folder / run_folder.SUPERVISION).read_text())
    assert VotedLease(head.folder, supervision, 2, (1, 999)).acquire() is False
