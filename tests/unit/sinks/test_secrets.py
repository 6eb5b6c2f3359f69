"""Secrets of a run: nobody else reads them, and what a killed supervisor leaves goes with the next request."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.unit.node.conftest import answer
from tridock.contracts.sinks import keep_secrets, read_secrets, secrets_file


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
