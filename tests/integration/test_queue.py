"""The queue on two containers: five runs, and a head that is killed between two of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.support import Twin, execute, give, succeed, wait_until
from tests.unit.node.test_queue import NAMES, make
from tridock.contracts.supervision import Reach, Supervision
from tridock.launchers.ssh import Ssh

UID = 1000


@pytest.fixture
def twin(start_twin: Callable[..., Twin]) -> Twin:
    started = start_twin(uid=UID)
    (started.workspace / "runs").mkdir()
    give(started.workspace / "runs", UID)
    return started


def node(twin: Twin, *argv: str | Path) -> str:
    prefix = ["docker", "exec", "--user", str(UID), twin["node-1"], "tridock-python", "-P", "-m", "tridock.node"]
    return succeed(*prefix, *map(str, argv))


def a_run(twin: Twin, name: str, slots: dict[str, Sequence[int]]) -> str:
    """A run of the workspace, for the head: its script is written for the paths in the container."""
    folder = make(twin.workspace, name, slots)
    script = (folder / "launch.sh").read_text().replace(str(twin.workspace), "/workspace")
    (folder / "launch.sh").write_text(script)
    reach: Reach = Ssh.reach
    remote = tuple(other for other in slots if other != "node-1")
    ranks = {other: (number,) for number, other in enumerate(slots)}
    port = 20000 + NAMES.index(name)
    supervision = Supervision("node-1", ranks, remote, port, 0.0, observed=True, reach=reach, launcher=Ssh.name)
    (folder / "supervision.json").write_text(supervision.to_json())
    for path in (folder, *folder.rglob("*")):
        give(path, UID)
    return f"/workspace/runs/{name}"


def order(twin: Twin) -> str:
    path = twin.workspace / "order"
    return path.read_text().replace("\n", "") if path.exists() else ""


@pytest.mark.full  # test_queue_over_ssh.py; tests/unit/node/test_queue.py
def test_five_runs_and_a_head_that_is_killed_between_two(twin: Twin) -> None:
    both = {"node-1": [0], "node-2": [0]}
    runs = [a_run(twin, name, both if name[0] != "d" else {"node-1": [1]}) for name in NAMES]
    answers = [json.loads(node(twin, "enqueue", run)) for run in runs]
    assert [it["started"] for it in answers] == [True, False, False, True, False]
    (twin.workspace / "a").touch()
    wait_until(lambda: order(twin).endswith("b"), "the second run has followed the first")
    (twin.workspace / "d").touch()
    wait_until(lambda: (twin.workspace / "runs" / NAMES[3] / "exit_code").exists(), "the run beside them has ended")

    succeed("docker", "kill", twin["node-1"])
    succeed("docker", "start", twin["node-1"])
    # Nobody asks: the node itself starts what waited there.
    wait_until(lambda: order(twin).endswith("c"), "the third run has started with the node")
    waiting = [run["run_id"] for run in json.loads(node(twin, "queue"))]
    assert waiting == [NAMES[4]]
    states = {run["run_id"][0]: run["state"] for run in json.loads(node(twin, "runs"))}
    assert states == {"a": "done", "b": "lost", "c": "running", "d": "done", "e": "ready"}
    (twin.workspace / "go").touch()
    wait_until(lambda: (twin.workspace / "runs" / NAMES[4] / "exit_code").exists(), "the last run has ended")
    assert order(twin) in ("adbce", "dabce")
    assert "the queue was not started" not in execute("docker", "logs", twin["node-1"]).stderr
