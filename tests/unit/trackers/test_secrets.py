"""Secrets of a run: nobody else reads them, and what a killed supervisor leaves goes with the next request."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.node.conftest import answer
from tridock.contracts.lease import HeldLease
from tridock.contracts.trackers import keep_secrets, read_secrets, secrets_file


def make(runs: Path, name: str, *files: str, age_s: float = 100.0) -> Path:
    folder = runs / f"{name}-20261123-195500-abcd"
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("4\n")
    keep_secrets(folder, {"A": name})
    os.utime(secrets_file(folder.name), (time.time() - age_s,) * 2)
    return folder


def test_a_request_removes_the_secrets_of_runs_that_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    runs = tmp_path / "runs"
    lost, failed = make(runs, "lost", ".supervisor"), make(runs, "failed", ".supervisor", "exit_code")
    removed = make(runs, "removed")
    shutil.rmtree(removed)
    waiting, again = make(runs, "waiting"), make(runs, "again", ".supervisor", "exit_code", age_s=0.0)
    elsewhere = make(tmp_path / "unmounted", "elsewhere")
    shutil.rmtree(elsewhere.parent)
    assert secrets_file(lost.name).stat().st_mode & 0o777 == 0o600
    answer("runs", "--workspace", str(tmp_path))
    there = {path.stem for path in secrets_file("a").parent.iterdir()}
    assert there == {folder.name for folder in (waiting, again, elsewhere)}
    assert read_secrets(waiting.name) == {"A": "waiting"}
    assert read_secrets(failed.name) == {}


@pytest.mark.parametrize("seen", ["lease", "ticket", "nothing"])
def test_a_node_that_could_take_the_run_over_has_its_secrets_too(seen: str, tmp_path: Path) -> None:
    """It is one that sees the head's files; another node would never know when the run is over."""
    folder = tmp_path / "runs" / "t-20261123-195500-abcd"
    (folder.parent / ".queue").mkdir(parents=True)
    folder.mkdir()
    if seen == "lease":
        HeldLease.first(folder, "n1", 0.0)
    elif seen == "ticket":
        (folder.parent / ".queue" / f"00000000-{folder.name}.json").write_text("{}")
    argv = [sys.executable, "-P", "-m", "tridock.node", "keep-secrets", str(folder)]
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run(argv, input=b'{"A": "hunter2"}', env=env, check=True)
    kept = tmp_path / ".tridock" / "secrets" / f"{folder.name}.json"
    assert kept.exists() is (seen != "nothing")
