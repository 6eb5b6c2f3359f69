"""A spare node that several runs ask for."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tridock.node.agent import spare_lock
from tridock.node.agent.spare_lock import busy_with, release

ONE, OTHER = "one-20261122-000000-aaaa", "other-20261122-000000-bbbb"


def test_the_first_run_gets_the_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests have runs on this machine.
    monkeypatch.setattr(spare_lock, "find_processes", list)
    assert busy_with(ONE, folder=tmp_path) == ()
    assert busy_with(OTHER, reserve=True, folder=tmp_path) == ()
    assert busy_with(ONE, folder=tmp_path) == (OTHER,)
    assert busy_with(ONE, reserve=True, folder=tmp_path) == (OTHER,)
    assert busy_with(OTHER, reserve=True, folder=tmp_path) == ()
    later = time.time() + spare_lock.RESERVED_S + 1
    monkeypatch.setattr(spare_lock.time, "time", lambda: later)
    assert busy_with(ONE, reserve=True, folder=tmp_path) == ()
    assert busy_with(OTHER, folder=tmp_path) == (ONE,)


def test_a_reservation_ends_when_the_ranks_have_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_lock, "find_processes", list)
    release(ONE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert busy_with(ONE, reserve=True, folder=tmp_path) == ()
    release(OTHER, tmp_path)
    assert busy_with(OTHER, folder=tmp_path) == (ONE,)
    release(ONE, tmp_path)
    assert busy_with(OTHER, reserve=True, folder=tmp_path) == ()


def test_one_of_eight_concurrent_runs_gets_the_spare(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tridock.node.agent import spare_lock;"
        "spare_lock.find_processes = list;"
        "sys.stdin.read(); print(spare_lock.busy_with(sys.argv[1], reserve=True, folder=Path(sys.argv[2])) == ())"
    )
    names = [f"run-20261122-000000-{number:04x}" for number in range(8)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", program, name, str(tmp_path)], **pipes) for name in names]  # type: ignore[call-overload]
    for process in started:
        process.stdin.close()
    said = [process.stdout.read().strip() for process in started]
    assert [process.wait() for process in started] == [0] * 8
    assert sorted(said) == ["False"] * 7 + ["True"]
