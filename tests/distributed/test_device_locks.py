"""Runs whose devices another process has locked, as a run of another cluster does."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from tests.distributed.supervised import Make
from tridock.contracts.run_state import is_supervised
from tridock.contracts.supervision import Reach
from tridock.node.agent import device_locks
from tridock.node.agent.device_locks import DeviceLocks
from tridock.node.agent.evidence import evidence
from tridock.triage import diagnose, facts_of

pytestmark = pytest.mark.distributed


@pytest.fixture
def device() -> str:
    return f"test {uuid.uuid4()}"


@pytest.fixture
def another(device: str) -> Iterator[DeviceLocks]:
    """What holds the device."""
    locks = DeviceLocks((device,))
    assert locks.take(at_once=True)
    yield locks
    locks.release()


def test_a_run_whose_devices_stay_taken_fails(make: Make, device: str, another: DeviceLocks) -> None:
    run = make(devices={"here": (device,)}, max_restarts=2)
    run.start()
    assert run.until(lambda: run.events("node_failed")) > 50.0
    assert run.end() == 2
    failed, refused = run.events()
    reason = failed.pop("reason")
    assert failed == {"event": "node_failed", "node": "here", "exit_code": 2, "cause": "devices_taken"}
    assert reason == (
        f"finds {device} in use by another run, maybe of another cluster (see tridock status); wait for it (--queue), "
        "leave its slots out (--exclude), or give --share"
    )
    assert refused == {"event": "not_restarted", "reason": "another run uses its devices"}
    assert run.said() == [
        f"tridock: waits for {device} on here, which another run uses",
        f"tridock: here {reason}",
        "tridock: not restarted: another run uses its devices",
    ]
    assert run.beat(0) is None
    assert diagnose(facts_of({"here": evidence(run.folder)}, "here", 2)).rule == "devices-taken"


def test_a_queued_run_waits_until_they_are_free(make: Make, device: str, another: DeviceLocks) -> None:
    run = make(devices={"here": (device,)}, queued=True)
    run.start()
    run.until(lambda: run.log() == [f"tridock: waits for {device} on here, which another run uses"])
    assert run.beat(0) is None
    another.release()
    run.train()
    assert not another.take(at_once=True)
    assert run.finish() == 0
    run.until(lambda: another.take(at_once=True))
    assert len(run.said()) == 1


def test_stop_ends_the_wait(make: Make, device: str, another: DeviceLocks) -> None:
    run = make(devices={"here": (device,)}, queued=True)
    run.start()
    run.until(run.said)
    run.stop()
    assert run.end() == 143
    assert run.events() == [{"event": "run_stopped"}]
    run.until(lambda: not is_supervised(run.folder))
    run.until(lambda: not run.others("agent"))


def test_a_run_keeps_its_devices_when_its_agent_is_replaced(make: Make, device: str) -> None:
    first = make(devices={"here": (device,)})
    first.start()
    first.train()
    second = make(devices={"here": (device,)}, queued=True)
    second.start()
    second.until(second.said)
    (agent,) = first.others("agent")
    os.kill(agent, signal.SIGKILL)
    first.until(lambda: [pid for pid in first.others("agent") if pid != agent])
    first.until(lambda: not device_locks._is_free(device))
    first.train(beyond=60)
    assert second.beat(0) is None
    assert first.finish() == 0
    second.train()
    assert second.finish() == 0


def test_a_restarted_run_has_kept_its_devices(make: Make, device: str) -> None:
    run = make(devices={"here": (device,)}, max_restarts=1, steps=240)
    run.start()
    run.train(beyond=22)
    run.signal(1, signal.SIGKILL)
    assert run.end() == 0
    assert [event["event"] for event in run.events("run_restarted", "node_failed")] == ["run_restarted"]


def test_a_run_that_is_taken_over_locks_them_again(make: Make, device: str) -> None:
    """The new supervisor begins in an agent's process, and must not keep what that had locked."""
    devices = {name: (f"{device} {name}",) for name in ("here", "there")}
    run = make(devices=devices, max_restarts=2, remote=("there",), reach=Reach())
    run.start()
    run.train(beyond=20)
    run.kill("start")
    run.until(lambda: run.events("run_restarted"))
    assert run.finish() == 0
    assert run.events("taken_over", "node_failed")[0]["event"] == "taken_over"
    for names in devices.values():
        run.until(lambda names=names: device_locks._is_free(*names))  # type: ignore[misc]


def test_a_node_that_does_not_let_the_head_in_is_named_before_the_start(make: Make, device: str) -> None:
    refuses = ("bash", "-c", "echo 'me@there: Permission denied (publickey).' >&2; exit 255", "{node}")
    run = make(devices={"here": (device,), "there": ()}, remote=("there",), reach=Reach(refuses))
    run.start()
    assert run.end() == 4
    (failed,) = run.events()
    assert (failed["node"], failed["cause"]) == ("there", "login_refused")
    assert run.beat(0) is None
