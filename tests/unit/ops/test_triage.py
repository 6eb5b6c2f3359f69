"""What a launch says at the end of a run that was preempted."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.ops.conftest import Lab
from tridock.cli import main
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.run_state import LOCK, RunState
from tridock.errors import RequestError
from tridock.ops.runs import triage
from tridock.ops.runs.cluster_runs import Run
from tridock.ops.runs.triage import PreemptedError, check_exit


def test_a_preempted_run_says_how_it_continues(lab: Lab) -> None:
    with pytest.raises(PreemptedError) as caught:
        check_exit(lab.client, Run("t-1", "node-1"), 85)
    assert str(caught.value) == (
        "t-1: the run was preempted and has saved a checkpoint; "
        f"continue it with tridock resume {lab.client.cluster.hosts_option} --run t-1"
    )


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (143, "stopped"), (85, "preempted"), (None, "running")])
def test_a_run_that_did_not_fail_is_no_error(
    code: int | None, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment.yaml").touch()
    if code is not None:
        (tmp_path / "exit_code").write_text(f"{code}\n")
    with (tmp_path / LOCK).open("w") as supervisor:
        fcntl.flock(supervisor, fcntl.LOCK_EX)
        assert main(["triage", str(tmp_path)]) == 0
        assert capsys.readouterr() == (f"{tmp_path}: did not fail: {state}\n", "")
        assert main(["triage", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"version": 1, "triage": None, "problems": []}


def test_a_copy_without_an_exit_code_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment.yaml").touch()
    assert main(["triage", str(tmp_path)]) == 0
    assert "the run failed; got no exit code" in capsys.readouterr().out
    assert main(["triage", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["triage"]
    assert (found["run"], found["exit_code"], found["failure"]) == (tmp_path.name, None, None)
    assert set(found["diagnosis"]) == {"rule", "cause", "remedy", "seen"}


def test_scripts_read_the_rank_that_failed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment.yaml").touch()
    (tmp_path / "exit_code").write_text("4\n")
    append_event(
        tmp_path, Event.RANK_DIED, rank=3, node="host-b", cause=Cause.RANK_SIGNALLED, reason="was ended by SIGKILL"
    )
    assert main(["triage", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["triage"]
    assert found["exit_code"] == 4
    assert found["failure"] == {
        "event": "rank_died", "cause": "rank_signalled", "rank": 3, "node": "host-b", "reason": "was ended by SIGKILL"
    }  # fmt: skip


def test_a_run_of_a_cluster_that_did_not_fail_is_no_error(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triage, "list_runs", lambda _: [SimpleNamespace(run_id="t-1", state=RunState.DONE)])
    assert triage.triage(lab.client, "t-1") == "t-1: did not fail: done"
    assert triage.triage(lab.client, None) == "no run of this cluster has failed"
    with pytest.raises(RequestError, match="--run: is not a run of this cluster; got t-2; use one of: none"):
        triage.triage(lab.client, "t-2")
