"""How the supervisor reaches a node's agent."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tridock.contracts.lease import HeldLease
from tridock.contracts.supervision import Reach, Supervision
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.ssh import Ssh
from tridock.node.supervisor.agent_connections import AgentConnections

FOLDER = Path("/workspace/runs/t-20260102-030405-abcd")
WATCH = ["-P", "-m", "tridock.node", "agent", str(FOLDER), "n2"]


def test_an_agent_on_this_machine() -> None:
    assert Reach().command("n2", *WATCH[3:]) == [sys.executable, *WATCH]


def test_an_agent_over_ssh() -> None:
    argv = Ssh.reach.command("n2", *WATCH[3:])
    assert argv[0] == "ssh"
    assert argv[-2:] == ["n2", shlex.join(["tridock-python", *WATCH])]


def test_an_agent_in_a_step_of_a_slurm_job_takes_nothing_from_the_ranks() -> None:
    argv = Slurm.reach.command("n2", *WATCH[3:])
    assert argv[:3] == ["srun", "--overlap", "--nodes=1"]
    assert {"--ntasks=1", "--cpus-per-task=1", "--gres=none", "--nodelist=n2"} < set(argv)
    assert argv[-7:] == [sys.executable, *WATCH]


def test_slurm_has_time_to_start_a_nodes_first_step(tmp_path: Path) -> None:
    ranks = {"n1": (0,), "n2": (1,)}
    supervision = Supervision("n1", ranks, ("n2",), 1, 30.0, reach=Slurm.reach)
    watches = AgentConnections(FOLDER, supervision, HeldLease.first(tmp_path, "n1", 0.0))
    assert watches.silence_s()["n1"] < 1
    assert watches.silence_s()["n2"] < -50


def test_from_a_login_node_the_head_is_watched_as_the_others_are() -> None:
    supervision = Supervision(
        "n1", {"n1": (0,)}, ("n1", "n2"), 1, 30.0, reach=Slurm.reach, scheduler="Slurm", on_head=False
    )
    assert supervision.watched == ("n1", "n2")
    assert Supervision.from_json(supervision.to_json()) == supervision
