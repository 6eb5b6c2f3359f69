"""A node's agent as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.node.conftest import wait_until
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.codec import decode
from tridock.contracts.rank_status import AgentMessage
from tridock.contracts.rotated_logs import RANK_BYTES
from tridock.contracts.run_state import RunState, state_of
from tridock.contracts.supervision import Supervision
from tridock.node.agent.node_agent import NodeAgent

ROOT = Path(__file__).parents[3]


def test_an_agent_rotates_the_logs_of_its_node(tmp_path: Path) -> None:
    folder = tmp_path / "steady-20260102-030405-abcd"
    logs = folder / "logs"
    logs.mkdir(parents=True)
    supervision = Supervision("n1", {"n1": (0, 1), "n2": (2,)}, ("n2",), 1, 30.0)
    (folder / run_folder.SUPERVISION).write_text(supervision.to_json())
    sizes = {"rank-0.log": RANK_BYTES, "rank-1.log": RANK_BYTES - 1, "rank-2.log": RANK_BYTES}
    for name, size in (*sizes.items(), ("rank-0.log", RANK_BYTES), ("rank-2.log", RANK_BYTES)):
        with (logs / name).open("wb") as log:
            log.truncate(size + 1)
    command = (sys.executable, "-m", "tridock.node", "agent", str(folder), "n1")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT) as agent:
        wait_until((logs / "rank-0.log.1").exists)
        wait_until(lambda: (logs / "rank-0.log").stat().st_size > 0)  # its first line comes then
        agent.kill()
    assert not (logs / "rank-1.log.1").exists()
    assert not (logs / "rank-2.log.1").exists()  # n2 may see the same folder
    assert "tridock: earlier output is in rank-0.log.1; " in (logs / "rank-0.log").read_text()


def test_where_an_agent_watches_the_launch_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "steady-20260102-030405-abcd"
    folder.mkdir()
    (folder / run_folder.INCOMPLETE).touch()
    assert state_of(folder) is RunState.INCOMPLETE
    (folder / run_folder.SUPERVISION).write_text(Supervision("n1", {"n1": (0,)}, (), 1, 30.0).to_json())
    NodeAgent(folder, "n1")
    assert state_of(folder) is RunState.READY  # as the head alone knows more


def test_an_agent_that_waits_for_its_disk_says_that_it_is_alive(tmp_path: Path) -> None:
    folder = tmp_path / "steady-20260102-030405-abcd"
    (folder / heartbeat.FOLDER).mkdir(parents=True)
    os.mkfifo(heartbeat.path_of(folder, 0))  # opening it waits, as on a file system whose server does not answer
    command = (sys.executable, "-m", "tridock.node", "agent", str(folder), "n1")
    (folder / run_folder.SUPERVISION).write_text(Supervision("n1", {"n1": (0,)}, (), 1, 30.0).to_json())
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as agent:
        assert agent.stdout is not None
        for _ in range(3):
            assert decode(AgentMessage, agent.stdout.readline()) == AgentMessage()
        agent.kill()


@pytest.mark.parametrize(("age_s", "missed"), [(0.0, 0), (1.0e9, 7)])
def test_an_agent_says_whether_its_container_is_younger_than_the_launch(
    tmp_path: Path, age_s: float, missed: int
) -> None:
    folder = tmp_path / "steady-20260102-030405-abcd"
    folder.mkdir()
    command = (sys.executable, "-m", "tridock.node", "agent", str(folder), "n1")
    (folder / run_folder.SUPERVISION).write_text(Supervision("n1", {"n1": (0,)}, (), 1, 30.0).to_json())
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(f"ping 7 {age_s}\n")
        agent.stdin.flush()
        said = (decode(AgentMessage, line) for line in agent.stdout)
        assert next(message for message in said if message.ranks is not None).missed_launch == missed
        agent.kill()
