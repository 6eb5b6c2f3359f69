"""The supervisor with ranks that train nothing: when and from where it restarts a run."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.distributed.supervised import Make
from tridock.contracts import run_folder
from tridock.contracts.lease import HeldLease
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.run_supervisor import RunSupervisor

pytestmark = pytest.mark.distributed


def test_a_run_continues_from_its_last_checkpoint_and_twice_at_most(make: Make) -> None:
    run = make(max_restarts=2)
    run.start()
    run.train(beyond=13)
    run.signal(1, signal.SIGKILL)
    run.until(lambda: run.events("run_restarted"))
    (event,) = run.events("run_restarted")
    assert event["attempt"] == 1
    assert event["iteration"] >= 10
    assert event["reason"].startswith("rank 1 on here was ended by SIGKILL after iteration ")
    run.train(beyond=event["iteration"])
    run.ask(0, "exit7")
    run.until(lambda: len(run.events("run_restarted")) == 2)
    run.train()
    run.signal(0, signal.SIGKILL)
    assert run.end() == 4
    assert run.events("not_restarted") == [
        {"event": "not_restarted", "reason": "restarted 2 times, and restart.max is 2"}
    ]
    last = run.said()
    assert last[1] == f"tridock: restart 1 of at most 2, from the checkpoint of iteration {event['iteration']}"
    assert last[-1] == "tridock: not restarted: restarted 2 times, and restart.max is 2"


@pytest.mark.full  # the one above restarts too
def test_a_run_without_a_checkpoint_restarts_from_scratch(make: Make) -> None:
    run = make(steps=150, max_restarts=1, checkpoints=None)
    run.start()
    run.train(beyond=1)
    run.signal(1, signal.SIGKILL)
    assert run.end() == 0
    died, restarted, *_ = run.events()
    log = (run.folder / run_folder.LAUNCHER_LOG).read_bytes()[restarted.pop("log_bytes") :]
    assert log.startswith(b"tridock: restart 1 of at most 1, from the beginning\n")
    assert restarted == {
        "event": "run_restarted", "attempt": 1, "iteration": 0, "reason": f"rank 1 on here {died['reason']}",
    }  # fmt: skip
    assert run.said()[-1] == "tridock: restart 1 of at most 1, from the beginning"


def test_a_checkpoint_from_before_the_run_is_not_its_own(make: Make, tmp_path: Path) -> None:
    manifest = tmp_path / "iter_0000050" / "files.json"
    run = make(steps=150, max_restarts=1, checkpoints=str(tmp_path))
    manifest.parent.mkdir()
    manifest.write_text("{}")
    os.utime(manifest, (1e9, 1e9))
    run.start()
    run.train(beyond=1)
    run.signal(1, signal.SIGKILL)
    assert run.end() == 0
    assert run.events("run_restarted")[0]["iteration"] == 0


@pytest.mark.parametrize(
    ("word", "reason"), [("fail2", "the request is wrong"), ("fail5", "every rank found the same")]
)
def test_what_would_fail_again_is_not_restarted(make: Make, word: str, reason: str) -> None:
    run = make(max_restarts=3)
    run.start()
    run.train()
    run.ask(0, word)
    assert run.end() == int(word[-1])
    assert run.events("run_restarted", "not_restarted") == [{"event": "not_restarted", "reason": reason}]


def test_a_restart_waits_for_the_port(make: Make) -> None:
    run = make(steps=150, max_restarts=1)
    port = Supervision.from_json((run.folder / run_folder.SUPERVISION).read_text()).master_port
    with socket.create_server(("", port)):
        run.start()
        run.train()
        run.signal(1, signal.SIGKILL)
        run.until(lambda: run.events("rank_died"))
        time.sleep(3.0)
        assert run.events("run_restarted") == []
    assert run.end() == 0
    assert len(run.events("run_restarted")) == 1


def test_a_port_that_stays_taken_is_named_with_its_holder(make: Make) -> None:
    run = make(ranks=0)
    supervision = Supervision.from_json((run.folder / run_folder.SUPERVISION).read_text())
    lease = HeldLease.first(run.folder, "here", 0.0)
    with (
        socket.create_server(("", supervision.master_port)),
        RunSupervisor(run.folder, supervision, lease) as supervisor,
    ):
        supervisor._agents.poll(0.0)
        found = supervisor._obstacle()
    name = Path("/proc/self/comm").read_text().strip()
    assert found == f"port {supervision.master_port} is taken by {name} (pid {os.getpid()})"
