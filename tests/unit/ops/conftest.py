"""Nodes for the tests of operations that need no ssh: folders of this machine, with a `docker` that runs in them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import HostFacts
from tridock.command import Command
from tridock.ops.hosts import facts as host_facts
from tridock.ops.hosts.attached import NodesLock
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import Container, HostState
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.sync.files import choose
from tridock.ops.sync.operation import Row, sync
from tridock.remote import Completed, Host, LocalHost
from tridock.remote.process import Process

LARGE = os.urandom(4_000_000)


class NodeHost(LocalHost):
    """A host whose `docker exec` runs in a folder."""

    def __init__(self, name: str, workspace: Path) -> None:
        super().__init__(name)
        self._env = {"WORKSPACE": str(workspace)}

    def start(self, command: Command, *given: Any, **named: Any) -> Process:
        return super().start(replace(command, env=self._env), *given, **named)

    def rsh(self, command: Command) -> str:
        return super().rsh(Command(("env", *(f"{name}={value}" for name, value in self._env.items()), *command.argv)))


class Unlocked(NodesLock):
    """The lock in a test without other commands."""

    def claim(self) -> None:
        pass

    def run(self, node: str, command: Command, timeout: float, host: Host | None = None) -> Completed:
        return (host or self._hosts[node]).run(command, timeout=timeout)


@dataclass
class Lab:
    """A project, and two hosts with a home of their own each; the nodes of ``up`` are running."""

    project: Path
    hosts: Hosts
    client: NodeClient
    bin: Path
    """Programs that come first on PATH, here and in the nodes."""
    up: set[str]

    def workspace(self, node: str) -> Path:
        return self.project.parent / node / "tridock" / "lab" / "workspace"

    def write(self, name: str, content: bytes) -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def below(self, node: str) -> dict[str, bytes]:
        """Every file of a workspace, hidden ones too, but the lock."""
        paths = (it for it in self.workspace(node).rglob("*") if it.is_file() and it.name != ".tridock-sync.lock")
        return {path.relative_to(self.workspace(node)).as_posix(): path.read_bytes() for path in paths}


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    project = tmp_path / "project"
    (project / "hostfiles").mkdir(parents=True)
    (project / "fabfile.py").touch()
    (project / "hostfiles" / "lab").write_text("node-1 slots=1\nnode-2 slots=1\n")
    cluster = load_cluster(project / "hostfiles" / "lab")
    folders = {node: tmp_path / node / "tridock" / "lab" / "workspace" for node in cluster.slots}
    hosts = Hosts(cluster, {node: NodeHost(node, folder) for node, folder in folders.items()})
    for folder in folders.values():
        folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    program(
        tmp_path / "bin" / "docker",
        'while [ "$1" != tridock-lab ]; do shift; done\nshift; cd "$WORKSPACE" && exec "$@"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    up = set(hosts)

    def read_state(_transport: object, node: str, _: Host) -> HostState:
        container = Container("1", "2", running=node in up, recipe=None, exit_code=0, health="healthy")
        return HostState(HostFacts(1, 1, str(tmp_path / node), 0, False), None, container, None)

    monkeypatch.setattr(host_facts, "read_state", read_state)
    monkeypatch.chdir(project)
    return Lab(project, hosts, NodeClient.of(hosts), tmp_path / "bin", up)


@pytest.fixture
def pair(lab: Lab) -> dict[str, bytes]:
    """A data set with its manifest; its tokens are large."""
    files = {"data/x.bin": LARGE, "data/x.idx": b"index", "data/x.json": b"{}"}
    for name, content in files.items():
        lab.write(name, content)
    return files


def brought(lab: Lab, *paths: str, **options: Any) -> list[Row]:
    synced = sync(lab.hosts, choose(lab.project, paths), **options)
    assert synced.nodes.failure() is None, synced.nodes.failure()
    return list(synced.rows)


def counts(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [(row.sent, row.there, row.bytes) for row in rows]
