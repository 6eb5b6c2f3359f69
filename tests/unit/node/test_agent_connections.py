"""How a watch comes to a node."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.agent_connections import Watches, watch_command

FOLDER = Path("/workspace/runs/t-20260102-030405-abcd")
WATCH = ["-P", "-m", "tridock.node", "watch", str(FOLDER), "n2"]


def test_a_watch_on_the_spot() -> None:
    assert watch_command(FOLDER, "n2", None) == [sys.executable, *WATCH]


def test_a_watch_over_ssh() -> None:
    words = watch_command(FOLDER, "n2", "ssh")
    assert words[0] == "ssh"
    assert words[-2:] == ["n2", shlex.join(["python", *WATCH])]


def test_a_watch_as_a_step_of_slurms_job_takes_nothing_from_the_ranks() -> None:
    words = watch_command(FOLDER, "n2", "srun")
    assert words[:3] == ["srun", "--overlap", "--nodes=1"]
    assert {"--ntasks=1", "--cpus-per-task=1", "--gres=none", "--nodelist=n2"} < set(words)
    assert words[-7:] == [sys.executable, *WATCH]


def test_a_watch_of_slurms_has_time_for_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"n1": (0,), "n2": (1,)}
    watches = Watches(FOLDER, Supervision("n1", ranks, ("n2",), 1, 30.0, reached_by="srun"))
    assert watches.silence_s()["n1"] < 1
    assert watches.silence_s()["n2"] < -50


def test_from_a_login_node_the_head_is_watched_as_the_others_are() -> None:
    supervision = Supervision("n1", {"n1": (0,)}, ("n1", "n2"), 1, 30.0, reached_by="srun", on_head=False)
    assert supervision.watched == ("n1", "n2")
    assert Supervision.from_json(supervision.to_json()) == supervision
