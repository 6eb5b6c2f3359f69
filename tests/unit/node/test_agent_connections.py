"""How the supervisor reaches a node's agent."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts import heartbeat
from tridock.contracts.codec import encode
from tridock.contracts.lease import HeldLease
from tridock.contracts.node_answers import Stopped
from tridock.contracts.rank_status import AgentMessage, LinkFaults, RankStatus
from tridock.contracts.supervision import Reach, Supervision
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.ssh import Ssh
from tridock.node.supervisor import agent_connections
from tridock.node.supervisor.agent_connections import AgentConnections
from tridock.node.supervisor.verdict import first_death

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


@pytest.mark.parametrize("reach", [Slurm.reach, Ssh.reach])
def test_another_node_has_time_to_start_its_agent_until_the_connection_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reach: Reach
) -> None:
    end = tmp_path / "end"
    wait = f"until [ -e {shlex.quote(str(end))} ]; do sleep 0.05; done"
    monkeypatch.setattr(Reach, "command", lambda self, node, *arguments: ["bash", "-c", wait])
    supervision = Supervision("n1", {"n1": (0,), "n2": (1,)}, ("n2",), 1, 30.0, reach=reach)
    connections = AgentConnections(FOLDER, supervision, HeldLease.first(tmp_path, "n1", 0.0))
    connections.poll(0.0)
    assert connections.silence_s()["n1"] >= 0
    assert connections.silence_s()["n2"] < -50
    end.touch()
    deadline = time.monotonic() + STEP_S
    while connections.silence_s()["n2"] < 0:
        assert time.monotonic() < deadline
        connections.poll(0.1)
    connections.close()


@pytest.fixture
def one_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentConnections, Path]]:
    """The connection to one agent, which writes its orders to a file."""
    orders = tmp_path / "orders"
    agent = ("bash", "-c", f"cat >{shlex.quote(str(orders))}")
    monkeypatch.setattr(agent_connections, "_PING_S", 0.05)
    monkeypatch.setattr(Reach, "command", lambda self, node, *arguments: [*agent])
    supervision = Supervision("n1", {"n1": (0,)}, (), 1, 30.0)
    connections = AgentConnections(FOLDER, supervision, HeldLease.first(tmp_path, "n1", 0.0))
    yield connections, orders
    connections.close()


def test_agents_get_pings_while_the_supervisor_waits_for_its_disk(one_agent: tuple[AgentConnections, Path]) -> None:
    connections, orders = one_agent
    connections.poll(0.0)
    deadline = time.monotonic() + STEP_S
    while not orders.exists() or orders.read_text().count("ping 0 ") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_node_is_not_silent_because_the_supervisor_waited_for_its_disk(
    one_agent: tuple[AgentConnections, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, _ = one_agent
    connections.poll(0.0)
    later = time.monotonic() + 100
    monkeypatch.setattr(agent_connections.time, "monotonic", lambda: later)
    assert connections.silence_s() == {"n1": 0.0}


def test_from_a_login_node_the_head_is_watched_as_the_others_are() -> None:
    supervision = Supervision(
        "n1", {"n1": (0,)}, ("n1", "n2"), 1, 30.0, reach=Slurm.reach, scheduler="Slurm", on_head=False
    )
    assert supervision.watched == ("n1", "n2")
    assert Supervision.from_json(supervision.to_json()) == supervision


def seen(phase: str, *, alive: bool) -> tuple[RankStatus, ...]:
    return (RankStatus(1, phase, 0, 1, 0, 0.0, alive=alive),)


@pytest.mark.parametrize(
    ("ranks", "missed", "fails"),
    [
        (seen(heartbeat.OBSERVED, alive=True), 0, True),
        (seen(heartbeat.GONE, alive=False), 1, True),  # seen to end in the last moment before its container did
        (seen(heartbeat.GONE, alive=False), 0, False),
        (seen(heartbeat.END, alive=False), 1, False),
        ((), 1, True),  # its container ended before the first report of the rank
        ((), 0, False),
        ((), 2, False),  # of another launch
    ],
)
def test_a_rank_that_a_new_agent_does_not_know_has_ended_with_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[RankStatus, ...], missed: int, fails: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    said = [
        shlex.quote(encode(AgentMessage(ranks=ranks))),
        shlex.quote(encode(AgentMessage(ranks=(), missed_launch=missed))),
    ]
    agent = f"mkdir {shlex.quote(str(first))} && echo {said[0]} || {{ echo {said[1]}; echo >{second}; cat; }}"
    monkeypatch.setattr(Reach, "command", lambda self, node, *arguments: ["bash", "-c", agent])
    supervision = Supervision("n1", {"n1": (1,)}, (), 1, 30.0)
    connections = AgentConnections(FOLDER, supervision, HeldLease.first(tmp_path, "n1", 0.0))
    connections.launched()
    deadline = time.monotonic() + STEP_S
    while not second.exists():
        assert time.monotonic() < deadline
        connections.poll(0.1)
    for _ in range(10):
        connections.poll(0.05)
    assert (first_death(connections.statuses()) is not None) is fails
    connections.close()


def test_what_agents_removed_is_known_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first look, and at a stop."""
    said = AgentMessage(ranks=(), removed=("/a",)), AgentMessage(stopped=Stopped(1, 0), removed=("/b", "/c"))
    agent = f"{'; '.join(f'echo {shlex.quote(encode(it))}' for it in said)}; cat"
    monkeypatch.setattr(Reach, "command", lambda self, node, *arguments: ["bash", "-c", agent])
    supervision = Supervision("n1", {"n1": (1,)}, (), 1, 30.0)
    connections = AgentConnections(FOLDER, supervision, HeldLease.first(tmp_path, "n1", 0.0))
    found: list[str] = []
    deadline = time.monotonic() + STEP_S
    while len(found) < 3 and time.monotonic() < deadline:
        connections.poll(0.1)
        found += connections.take_removed().get("n1", [])
    assert found == ["/a", "/b", "/c"]
    assert connections.take_removed() == {}
    connections.close()


def test_how_far_a_clock_is_ahead_by_the_report_that_came_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports that were 3 s and 0.5 s on their way, from a clock that is 60 s ahead."""
    said = [encode(AgentMessage(ranks=(), clock_s=time.time() + 60 - late)) for late in (3.0, 0.5)]
    links = encode(AgentMessage(ranks=(), links=(LinkFaults("eth0", 1),)))
    agent = "; ".join([*(f"echo {shlex.quote(line)}" for line in (*said, links)), "cat"])
    monkeypatch.setattr(Reach, "command", lambda self, node, *arguments: ["bash", "-c", agent])
    supervision = Supervision("n1", {"n1": (1,)}, (), 1, 30.0)
    connections = AgentConnections(FOLDER, supervision, HeldLease.first(tmp_path, "n1", 0.0))
    connections.launched()
    deadline = time.monotonic() + STEP_S
    while not connections.link_faults() and time.monotonic() < deadline:
        connections.poll(0.1)
    assert connections.link_faults() == {"n1": (LinkFaults("eth0", 1),)}
    assert 0 < 60 - 0.5 - connections.clocks_s()["n1"] < STEP_S
    connections.launched()
    assert connections.link_faults() == {}
    connections.close()
