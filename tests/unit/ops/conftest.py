"""Hosts for the tests of operations that need no ssh: folders of this machine, reached as the twin's host is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tridock.cluster.transports import HostFacts
from tridock.ops.hosts.facts import HostState
from tridock.ops.hosts.session import Session
from tridock.ops.sync import Row, choose, sync, transfer
from tridock.remote import Host, LocalHost

LARGE = os.urandom(transfer.SMALL + 12345)
"""Goes on where it was cut off."""


@dataclass
class Lab:
    """A project, and two hosts with a home of their own each."""

    project: Path
    session: Session

    def workspace(self, node: str) -> Path:
        return self.project.parent / node / "tridock" / "lab" / "workspace"

    def write(self, name: str, content: bytes) -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def below(self, node: str) -> dict[str, bytes]:
        """Every file of a workspace, hidden ones too."""
        paths = (path for path in self.workspace(node).rglob("*") if path.is_file())
        return {path.relative_to(self.workspace(node)).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    project = tmp_path / "project"
    (project / "hostfiles").mkdir(parents=True)
    (project / "fabfile.py").touch()
    (project / "hostfiles" / "lab").write_text("node-1 slots=1\nnode-2 slots=1\n")
    session = Session.open(project / "hostfiles" / "lab")
    hosts: dict[str, Host] = {node: LocalHost(node) for node in session.nodes}
    monkeypatch.setattr(session, "hosts", hosts)

    def read_state(node: str, _: Host) -> HostState:
        return HostState(HostFacts(1, 1, str(tmp_path / node), 0, False), None, None, None)

    monkeypatch.setattr(session, "read_state", read_state)
    monkeypatch.chdir(project)
    return Lab(project, session)


@pytest.fixture
def pair(lab: Lab) -> dict[str, bytes]:
    """A data set with its manifest; its tokens are large."""
    files = {"data/x.bin": LARGE, "data/x.idx": b"index", "data/x.json": b"{}"}
    for name, content in files.items():
        lab.write(name, content)
    return files


def brought(lab: Lab, *paths: str, **options: Any) -> list[Row]:
    synced = sync(lab.session, choose(lab.project, paths), **options)
    assert synced.failure is None, synced.failure
    return list(synced.rows)


def counts(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [(row.sent, row.there, row.bytes) for row in rows]
