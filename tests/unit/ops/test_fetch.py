"""Bringing a run home where it is at home already; the rest needs hosts (tests/integration/test_fab_over_ssh.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock.cluster import load_cluster
from tridock.cluster.containers import HostFacts
from tridock.ops.facts import HostState
from tridock.ops.fetch import fetch
from tridock.ops.runs import Run
from tridock.ops.session import Session


def test_the_twins_own_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked over itself, a log that a rank writes would lose what comes after."""
    (tmp_path / "twin").write_text("node-1 slots=1\n")
    (tmp_path / "twin.yaml").write_text("transport: compose\n")
    session = Session(load_cluster(tmp_path / "twin", project_folder=tmp_path))
    session._states = {"node-1": HostState(HostFacts(1000, 1000, "/home/ada", 0, False), "28.1", None, None)}
    log = tmp_path / "runs" / "a" / "log"
    log.parent.mkdir(parents=True)
    log.write_text("so far\n")
    monkeypatch.chdir(tmp_path)
    assert fetch(session, Run("a", "node-1"), Path("runs"), checkpoints=True) == Path("runs/a")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert log.read_text() == "so far\n"
