"""A launch on slots that another run has in use."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tridock.cluster.settings import load_cluster
from tridock.contracts.node_answers import QueuedRun, RunInfo
from tridock.contracts.run_state import RunState
from tridock.errors import RequestError
from tridock.node.agent.runs import list_runs
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs import cluster_runs
from tridock.ops.runs.provenance import operator
from tridock.remote import Completed
from tridock.report.run_tables import queue_table

RUN = RunInfo("a-20260101-000000-1234", RunState.RUNNING, None, "20260101-000000", None, "a", (), 10, 1.0, 1.0)


@pytest.fixture
def client(tmp_path: Path) -> NodeClient:
    (tmp_path / "my lab").write_text("gpu-1 slots=4\ngpu-2 slots=4\n")
    return NodeClient(Hosts(load_cluster(tmp_path / "my lab", exclude="gpu-2:0,1")), {})


def test_the_run_that_has_them_is_named(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [replace(RUN, slots={"gpu-1": (0, 1), "gpu-2": (0, 1)}), replace(RUN, run_id="b", slots={"gpu-2": (2,)})]
    monkeypatch.setattr(cluster_runs, "list_runs", lambda _: runs)
    with pytest.raises(RequestError) as caught:
        cluster_runs.refuse_slots_in_use(client)
    option = client.cluster.hosts_option
    assert option.startswith("--hosts '/")
    todo = "stop it (tridock stop), leave its slots out (--exclude), or give --share"
    assert str(caught.value).splitlines() == [
        f"{RUN.run_id}: is running on slots that this run would use; got gpu-1: 0,1; "
        f"wait for it (--queue; tridock logs {option} --run {RUN.run_id}), {todo}",
        "b: is running on slots that this run would use; got gpu-2: 2; "
        f"wait for it (--queue; tridock logs {option} --run b), {todo}",
    ]


def test_other_slots_are_free(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_runs, "list_runs", lambda _: [replace(RUN, slots={"gpu-2": (0, 1), "gpu-3": (2,)})])
    cluster_runs.refuse_slots_in_use(client)


def test_a_node_tells_the_slots_of_an_active_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / RUN.run_id
    folder.mkdir(parents=True)
    ranks = [{"rank": 0, "node": "gpu-1", "slot": 2}, {"rank": 1, "node": "gpu-1", "slot": 3}]
    (folder / "plan.json").write_text(json.dumps({"ranks": ranks}))
    for state, slots in ((RunState.RUNNING, {"gpu-1": (2, 3)}), (RunState.DONE, {})):
        monkeypatch.setattr("tridock.node.agent.runs.state_of", lambda _, state=state: state)
        assert list_runs(tmp_path)[0].slots == slots


@pytest.mark.parametrize(
    ("of_head", "state", "taken"),
    [
        (RunState.READY, RunState.RUNNING, True),  # its head is not in the hostfile, or is away
        (RunState.INCOMPLETE, RunState.RUNNING, True),  # the agent on the node was not fast enough to say otherwise
        (RunState.RUNNING, RunState.RUNNING, True),
        (RunState.LOST, RunState.LOST, True),  # its supervisor is gone, and its ranks are not yet
        (RunState.DONE, RunState.DONE, False),
    ],
)
def test_a_run_is_what_its_processes_say(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch, of_head: RunState, state: RunState, taken: bool
) -> None:
    slots = {"gpu-1": (0,), "gpu-2": (2,)}
    answers = {
        "gpu-1": (replace(RUN, state=of_head),),
        "gpu-2": (replace(RUN, state=RunState.READY, slots=slots, has_processes=True),),
    }
    monkeypatch.setattr(client, "running", lambda: ("gpu-1", "gpu-2"))
    monkeypatch.setattr(client.hosts, "each", lambda *_, **__: answers)
    (run,) = cluster_runs.list_runs(client)
    assert (run.state, dict(run.slots)) == (state, slots if taken else {})


@pytest.mark.parametrize(
    ("metrics", "iters", "text"),
    [
        ({"iteration": 40, "step_time_s": 2.0}, 100, ", until about 12:02 UTC (iteration 40 of 100)"),
        ({"iteration": 40, "step_time_s": 60.0}, 1000, ", until about 2026-01-02 04:00 UTC (iteration 40 of 1000)"),
        ({"iteration": 40}, 100, ""),
        ({"iteration": 40, "step_time_s": 2.0}, None, ""),
        (None, 100, ""),
    ],
)
def test_until_when_a_run_has_its_slots(metrics: dict[str, float] | None, iters: int | None, text: str) -> None:
    now = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
    assert cluster_runs.until(replace(RUN, metrics=metrics, train_iters=iters), now) == text


def test_the_queue_is_on_the_first_node(client: NodeClient, tmp_path: Path) -> None:
    cluster_runs.require_queue_node(client.hosts)
    with pytest.raises(RequestError) as caught:
        cluster_runs.require_queue_node(Hosts(load_cluster(tmp_path / "my lab", include="gpu-2")))
    assert str(caught.value) == (
        "--queue: is kept on gpu-1, which this run does not use; got head gpu-2; use a slot of it, or launch without"
        " --queue"
    )


def test_a_run_is_removed_by_its_name_or_as_the_only_one(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [QueuedRun("a", "gpu-1", 0.0, {"gpu-1": (0, 1)}, ("x",)), QueuedRun("b", "gpu-1", 0.0, {}, ("a",))]
    asked: list[tuple[str, ...]] = []

    def verb(node: str, *argv: str, **_: object) -> Completed:
        asked.append((node, *argv))
        return Completed(2 if argv[1].endswith("c") else 0, b"", b"")

    monkeypatch.setattr(client, "node_verb", verb)
    monkeypatch.setattr(cluster_runs, "queued_runs", lambda _: waiting)
    mine = replace(RUN, run_id="a", started_by=operator())
    monkeypatch.setattr(cluster_runs, "list_runs", lambda _: [mine, replace(RUN, run_id="d", started_by="ada@desk")])
    assert cluster_runs.cancel(client, "b") == "b"
    assert asked == [("gpu-1", "cancel", "/workspace/runs/b")]
    with pytest.raises(RequestError, match="--run: is needed while several runs wait; got a, b; see tridock status"):
        cluster_runs.cancel(client, None)
    with pytest.raises(RequestError, match="--run: is not a queued run; got c; use one of: a, b; tridock stop ends"):
        cluster_runs.cancel(client, "c")
    with pytest.raises(
        RequestError, match=r"d: was not started by you \(.*\); got ada@desk; ask them, or give --force"
    ):
        cluster_runs.cancel(client, "d")
    assert cluster_runs.cancel(client, "d", force=True) == "d"
    del waiting[1]
    assert cluster_runs.cancel(client, None) == "a"


def test_the_table_of_the_queue() -> None:
    table = queue_table([QueuedRun("a", "gpu-1", 0.0, {"gpu-1": (0, 1), "gpu-2": (3,)}, ("x", "y"))])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["a", "1970-01-01 00:00", "gpu-1: 0,1; gpu-2: 3", "x, y"]
