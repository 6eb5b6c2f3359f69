"""The record of a rank's process: written beside it, whatever reaps it and however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.node.conftest import wait_until
from tridock.contracts import heartbeat, process_records, run_folder
from tridock.contracts.process_records import ProcessRecord
from tridock.node.agent import rank_status
from tridock.node.agent.rank_status import RankMonitor
from tridock.node.supervisor.verdict import first_death

NODE = "here"


def started(folder: Path, rank: int, script: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "tridock.node.rank_output", "--program", "sh", "-c", script]
    env = {"TRIDOCK_RUN_FOLDER": str(folder), "TRIDOCK_RUN_ID": folder.name, "TRIDOCK_NODE": NODE, "RANK": str(rank)}
    return subprocess.Popen(argv, env={**os.environ, **env}, stdout=subprocess.DEVNULL, start_new_session=True)


def record(folder: Path, rank: int) -> ProcessRecord | None:
    return process_records.read(process_records.folder_of(folder, NODE) / f"rank-{rank}")


def is_complete(folder: Path, rank: int) -> bool:
    found = record(folder, rank)
    return found is not None and found.ended_s is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / run_folder.new_run_id("ends")


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 3", 3 << 8), ("exit 0", 0), ("kill -9 $$", signal.SIGKILL), ("kill $$", signal.SIGTERM)],
)
def test_an_end_is_recorded(folder: Path, script: str, status: int) -> None:
    began = time.monotonic()
    process = started(folder, 1, script)
    wait_until(lambda: is_complete(folder, 1))
    found = record(folder, 1)
    assert found is not None
    assert (found.pid, found.wait_status) == (process.pid, status)
    assert found.ended_s is not None
    assert began < found.started_s < found.ended_s < time.monotonic()
    process.wait()


def test_the_process_beside_it_outlives_its_signals_and_its_session(folder: Path) -> None:
    process = started(folder, 0, f"echo > {folder}/ready; exec sleep 9999")
    wait_until((folder / "ready").exists)
    assert not is_complete(folder, 0)
    os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: is_complete(folder, 0))
    process.wait()


def test_ranks_that_ended_before_the_agent_looked_are_judged_by_their_records(folder: Path) -> None:
    """As under torchrun, which ends rank 0 once rank 1 has failed."""
    failed = started(folder, 1, "exit 7")
    failed.wait()
    wait_until(lambda: is_complete(folder, 1))
    ended = started(folder, 0, f"echo > {folder}/ready; exec sleep 9999")
    wait_until((folder / "ready").exists)
    ended.terminate()
    ended.wait()
    wait_until(lambda: is_complete(folder, 0))
    monitor = RankMonitor(folder, (0, 1), observed=True, node=NODE)
    seen = monitor.read()
    assert {status.rank: status.wait_status for status in seen} == {0: signal.SIGTERM, 1: 7 << 8}
    assert str(first_death({NODE: seen})) == "rank 1 on here exited with code 7"
    monitor.reset()
    assert monitor.read() == []


def test_an_end_is_reported_once_it_is_recorded_or_its_record_is_overdue(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(["sleep", "9999"])
    ticks = heartbeat.start_ticks(process.pid)
    begun = ProcessRecord(0, process.pid, ticks, process_records.this_container(), time.monotonic(), 0)
    process_records.write(folder, NODE, begun)
    monitor = RankMonitor(folder, (0,), observed=True, node=NODE)
    assert [status.alive for status in monitor.read()] == [True]
    assert not monitor.awaits_records
    process.kill()
    process.wait()
    assert [status.alive for status in monitor.read()] == [False]
    assert monitor.awaits_records
    monkeypatch.setattr(rank_status, "_RECORD_S", 0.0)
    assert not monitor.awaits_records
    monkeypatch.undo()
    process_records.write(folder, NODE, replace(begun, ended_s=time.monotonic() - 60, wait_status=9))
    (status,) = monitor.read()
    assert not monitor.awaits_records
    assert status.gone_s > 59


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rank": 0}'])
def test_what_is_no_record_is_none(folder: Path, content: bytes) -> None:
    run_folder.write_atomic(process_records.folder_of(folder, NODE) / "rank-0", content)
    assert RankMonitor(folder, (0,), observed=True, node=NODE).read() == []


def test_a_record_of_an_earlier_container_does_not_count(folder: Path) -> None:
    process_records.write(folder, NODE, ProcessRecord(0, 1, 1, "another", 1.0, 0, 2.0, 9))
    assert record(folder, 0) is None
