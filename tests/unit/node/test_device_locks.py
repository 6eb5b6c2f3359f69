"""Locks of devices: between processes, and as a node's agent orders them for the supervisor."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts import run_folder
from tridock.contracts.lease import HeldLease
from tridock.contracts.supervision import Reach, Supervision
from tridock.node.agent import device_locks
from tridock.node.agent.device_locks import DeviceLocks
from tridock.node.supervisor.agent_connections import AgentConnections

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from tridock.node.agent.device_locks import DeviceLocks
locks = DeviceLocks(sys.argv[1:])
if not locks.take(at_once=True):
    print("waits for", *locks.report.missing, flush=True)
while not (locks.report.missing == () or locks.take(at_once=True)):
    time.sleep(0.02)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device() -> str:
    """One that no other test has."""
    return f"test {uuid.uuid4()}"


@contextmanager
def holder(*devices: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A process that locks the devices as soon as it can, and what it prints."""
    argv, pipe = [sys.executable, "-c", HOLD, *devices], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process, (line.strip() for line in process.stdout)
        finally:
            process.kill()


def test_the_kernel_frees_what_a_killed_process_held(device: str) -> None:
    with holder(device) as (first, said), holder(f"{device}, another") as (_, other):
        assert (next(said), next(other)) == ("holds", "holds")
        with holder(device) as (_, second):
            assert next(second) == f"waits for {device}"
            first.kill()
            assert next(second) == "holds"


def test_all_or_none(device: str) -> None:
    a, b = f"{device} a", f"{device} b"
    with holder(b) as (process, said):
        assert next(said) == "holds"
        both = DeviceLocks((a, b, b))
        assert not both.take(at_once=True)
        assert both.report.missing == (b,)
        alone = DeviceLocks((a,))
        assert alone.take(at_once=True)
        alone.release()
        process.kill()
    assert both.take(at_once=True)
    assert both.report.missing == ()
    assert not both.take(at_once=True)  # nothing new
    both.release()


def test_a_run_in_use_has_precedence_over_one_that_waits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent may only be starting again."""
    now = [0.0]
    monkeypatch.setattr(device_locks.time, "monotonic", lambda: now[0])
    used, waits, again = (DeviceLocks((device,)) for _ in range(3))
    assert used.take(at_once=False)
    assert not waits.take(at_once=False)
    used.release()
    now[0] = 19.0
    assert not waits.take(at_once=False)
    assert again.take(at_once=True)
    again.release()
    now[0] = 21.0
    assert waits.take(at_once=False)
    waits.release()


def test_no_devices_are_locked_at_once() -> None:
    locks = DeviceLocks(())
    assert not locks.take(at_once=False)
    assert (locks.report.domain, locks.report.missing) == ("", ())


def test_nodes_after_one_that_waits_let_go(device: str, tmp_path: Path) -> None:
    """Else two runs, each with what the other wants, would wait for each other."""
    devices = {name: (f"{device} {name}",) for name in ("n1", "n2", "n3")}
    folder = tmp_path / "t-20260102-030405-abcd"
    folder.mkdir()
    ranks = {name: (rank,) for rank, name in enumerate(devices)}
    supervision = Supervision("n1", ranks, ("n2", "n3"), 1, 30.0, reach=Reach(), devices=devices)
    (folder / run_folder.SUPERVISION).write_text(supervision.to_json())
    taken, probe = DeviceLocks(devices["n2"]), DeviceLocks(devices["n3"])
    assert taken.take(at_once=True)
    connections = AgentConnections(folder, supervision, HeldLease.first(folder, "n1", 0.0))
    deadline = time.monotonic() + STEP_S
    try:
        while connections.lock_devices() != ("n2", devices["n2"]):
            assert time.monotonic() < deadline
            connections.poll(0.05)
        while not probe.take(at_once=True):
            assert time.monotonic() < deadline
            connections.poll(0.05)
            assert connections.lock_devices() is not None
        taken.release()
        while connections.lock_devices() != ("n3", devices["n3"]):
            assert time.monotonic() < deadline
            connections.poll(0.05)
        probe.release()
        while connections.lock_devices() is not None:
            assert time.monotonic() < deadline
            connections.poll(0.05)
        for names in devices.values():
            assert not DeviceLocks(names).take(at_once=True)
    finally:
        connections.close()
