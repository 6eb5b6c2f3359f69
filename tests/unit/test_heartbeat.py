"""A rank's heartbeat: a reader gets what was written, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tridock.contracts import heartbeat


def test_what_is_written_is_read(tmp_path: Path) -> None:
    before = time.monotonic()
    writer = heartbeat.HeartbeatWriter(tmp_path, 3)
    writer.beat(heartbeat.TRAIN, 7)
    writer.beat(heartbeat.FAILED, code=4)
    beat = heartbeat.read(tmp_path, 3)
    assert beat is not None
    assert (beat.pid, beat.start_ticks) == (os.getpid(), heartbeat.start_ticks(os.getpid()))
    assert (beat.count, beat.iteration, beat.phase, beat.code) == (2, 7, "failed", 4)
    assert before - 0.01 <= beat.time_s <= time.monotonic() + 0.01  # it is rounded


def test_a_shorter_line_leaves_nothing_of_the_longer_one(tmp_path: Path) -> None:
    writer = heartbeat.HeartbeatWriter(tmp_path, 0)
    writer.beat(heartbeat.TRAIN, 10**9)
    writer.beat(heartbeat.TRAIN, 1)
    assert heartbeat.path_of(tmp_path, 0).stat().st_size == 128
    beat = heartbeat.read(tmp_path, 0)
    assert beat is not None
    assert beat.iteration == 1


def test_a_rank_measures_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one counts as a step time, but not as one of the steps after which its limit is known."""
    clock = iter([0.0, 100.0, 131.0, 141.0, 150.0, 170.0, 176.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    writer = heartbeat.HeartbeatWriter(tmp_path, 0)
    known = []
    for phase, iteration in (
        (heartbeat.START, None), (heartbeat.FIRST_STEP, 0), (heartbeat.TRAIN, 1), (heartbeat.TRAIN, 2),
        (heartbeat.EVAL, None), (heartbeat.TRAIN, None), (heartbeat.TRAIN, 3),
    ):  # fmt: skip
        writer.beat(phase, iteration)
        beat = heartbeat.read(tmp_path, 0)
        assert beat is not None
        known.append((beat.steps, beat.longest_step_s))
    assert known == [(0, 0.0), (0, 0.0), (0, 31.0), (1, 31.0), (1, 31.0), (1, 31.0), (2, 31.0)]


def test_a_touch_is_progress_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    writer = heartbeat.HeartbeatWriter(tmp_path, 0)
    writer.beat(heartbeat.TRAIN, 7)
    before = heartbeat.read(tmp_path, 0)
    assert before is not None
    now = 5.2
    writer.touch()
    assert heartbeat.read(tmp_path, 0) == before  # at most four times a second
    now = 8.0
    writer.touch()
    assert heartbeat.read(tmp_path, 0) == replace(before, time_s=8.0)
    now = 9.0
    writer.beat(heartbeat.TRAIN, 8)
    after = heartbeat.read(tmp_path, 0)
    assert after is not None
    assert (after.count, after.steps, after.longest_step_s) == (2, 1, 4.0)


@pytest.mark.parametrize("content", [b"", b"1 2 3", b"a b c d e f g"])
def test_a_file_that_holds_no_heartbeat_yet(tmp_path: Path, content: bytes) -> None:
    assert heartbeat.read(tmp_path, 0) is None
    path = heartbeat.path_of(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(content)
    assert heartbeat.read(tmp_path, 0) is None


def test_a_process_that_is_no_rank_writes_no_heartbeat(tmp_path: Path) -> None:
    script = "from tridock.contracts import heartbeat; heartbeat.beat(heartbeat.TRAIN, 1)"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())}, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_costs_next_to_nothing(tmp_path: Path) -> None:
    writer = heartbeat.HeartbeatWriter(tmp_path, 0)
    times = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(1000):
            writer.beat(heartbeat.TRAIN, 7)
        times.append(time.process_time() - began)
    assert min(times) / 1000 < 100e-6
