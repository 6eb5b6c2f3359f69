"""A launch on slots that another run has in use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tridock.contracts.node_answers import RunInfo
from tridock.contracts.run_state import RunState
from tridock.errors import RequestError
from tridock.node.agent.runs import list_runs
from tridock.ops.hosts.session import Session
from tridock.ops.runs import registry

RUN = RunInfo("a-20260101-000000-1234", RunState.RUNNING, None, "20260101-000000", None, "a", (), 10, 1.0, 1.0)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    (tmp_path / "my lab").write_text("gpu-1 slots=4\ngpu-2 slots=4\n")
    return Session.open(tmp_path / "my lab", exclude="gpu-2:0,1")


def test_the_run_that_has_them_is_named(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [replace(RUN, slots={"gpu-1": (0, 1), "gpu-2": (0, 1)}), replace(RUN, run_id="b", slots={"gpu-2": (2,)})]
    monkeypatch.setattr(registry, "list_runs", lambda _: runs)
    with pytest.raises(RequestError) as caught:
        registry.refuse_slots_in_use(session)
    option = session.cluster.hosts_option
    assert option.startswith("--hosts '/")
    todo = "stop it (tridock stop), leave its slots out (--exclude), or give --share"
    assert str(caught.value).splitlines() == [
        f"{RUN.run_id}: is running on slots that this run would use; got gpu-1: 0,1; "
        f"wait for it (tridock logs {option} --run {RUN.run_id}), {todo}",
        "b: is running on slots that this run would use; got gpu-2: 2; "
        f"wait for it (tridock logs {option} --run b), {todo}",
    ]


def test_other_slots_are_free(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "list_runs", lambda _: [replace(RUN, slots={"gpu-2": (0, 1), "gpu-3": (2,)})])
    registry.refuse_slots_in_use(session)


def test_a_node_tells_the_slots_of_an_active_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / RUN.run_id
    folder.mkdir(parents=True)
    ranks = [{"rank": 0, "node": "gpu-1", "slot": 2}, {"rank": 1, "node": "gpu-1", "slot": 3}]
    (folder / "plan.json").write_text(json.dumps({"ranks": ranks}))
    for state, slots in ((RunState.RUNNING, {"gpu-1": (2, 3)}), (RunState.DONE, {})):
        monkeypatch.setattr("tridock.node.agent.runs.state_of", lambda _, state=state: state)
        assert list_runs(tmp_path)[0].slots == slots
