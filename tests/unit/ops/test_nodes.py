"""A launch brings the nodes up only where one is not as it should be."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.ops.conftest import Unlocked
from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import HostFacts, SshTransport
from tridock.command import Command
from tridock.errors import ClusterError
from tridock.ops.hosts.client import NodeClient, reachable
from tridock.ops.hosts.facts import Container, HostState, keys_digest, read_state
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.hosts.keys import KeyStore
from tridock.ops.nodes import containers
from tridock.remote import Completed

FACTS = HostFacts(uid=1000, gid=100, home="/home/ada", gpus=0, infiniband=False)
IMAGE = "sha256:0123"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeClient:
    """Two nodes that are all right."""
    (tmp_path / "fabfile.py").touch()
    (tmp_path / "lab").write_text("a slots=1\nb slots=1\n")
    made = Hosts(load_cluster(tmp_path / "lab"))
    store = KeyStore(made.cluster)
    store.ensure()
    states = {}
    for node in made:
        recipe = made.transport.recipe(node, IMAGE, FACTS)
        container = Container("1", IMAGE, running=True, recipe=recipe, exit_code=0, health="healthy")
        states[node] = HostState(FACTS, IMAGE, container, keys_digest(store.node_files(node)))
    monkeypatch.setattr("tridock.ops.image.ensure.image_id", lambda _: IMAGE)
    monkeypatch.setattr(containers, "up", lambda _: "brought up")
    return NodeClient(made, states)


def test_nodes_of_another_folder_are_refused(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    state = client.states["a"]
    assert state.container is not None
    theirs = replace(state, container=replace(state.container, workspace="/home/eve/tridock/lab/workspace"))
    monkeypatch.setattr("tridock.ops.hosts.facts.parse_facts", lambda *_: theirs)
    host = Mock(run=Mock(return_value=Completed(0, b"", b"")))
    with pytest.raises(ClusterError) as caught:
        read_state(client.hosts.transport, "a", host)
    assert str(caught.value) == (
        "a: its container tridock-lab is not this cluster's; got that of /home/eve/tridock/lab/workspace, and this "
        "one's is /home/ada/tridock/lab/workspace; use its folder (workdir) or account (ssh.user), or give this "
        "cluster another name: rename its hostfile"
    )


def test_nodes_of_another_account_are_refused(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder that both may write to."""
    state = client.states["a"]
    assert state.container is not None
    theirs = replace(state.container, workspace=client.hosts.transport.workspace(FACTS), user="1001:100")
    for user, refused in (("1001:100", True), ("1000:100", False)):
        found = replace(state, container=replace(theirs, user=user))
        monkeypatch.setattr("tridock.ops.hosts.facts.parse_facts", lambda *_, found=found: found)
        host = Mock(run=Mock(return_value=Completed(0, b"", b"")))
        if not refused:
            assert read_state(client.hosts.transport, "a", host) is found
            continue
        with pytest.raises(ClusterError) as caught:
            read_state(client.hosts.transport, "a", host)
        assert str(caught.value) == (
            "a: its container tridock-lab is not this cluster's; got uid:gid 1001:100, and yours are 1000:100; use "
            "its folder (workdir) or account (ssh.user), or give this cluster another name: rename its hostfile"
        )


def test_hosts_that_all_answer_give_their_facts_once(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def read(_transport: object, node: str, _host: object) -> HostState:
        asked.append(node)
        return client.states[node]

    monkeypatch.setattr("tridock.ops.hosts.facts.read_state", read)
    there, failure = reachable(client.hosts)
    assert (there.states, there.hosts.nodes, failure) == (client.states, ("a", "b"), None)
    assert sorted(asked) == ["a", "b"]


def test_where_all_is_right_nothing_is_done(client: NodeClient) -> None:
    assert containers.ensure_up(client) == (IMAGE, client)


@pytest.mark.parametrize(
    "change",
    [
        {"container": None},
        {"running": False},
        {"recipe": "of other settings"},
        {"recipe": None},
        {"health": "starting"},
        {"health": None},
        {"keys": "from before a rotation"},
        {"keys": None},
        {"image_id": None},
    ],
    ids=str,
)
def test_one_node_that_is_not_right_brings_all_up(
    client: NodeClient, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = client.states["b"]
    assert state.container is not None
    own = {name: value for name, value in change.items() if name in ("container", "keys", "image_id")}
    of_container = {name: value for name, value in change.items() if name not in own}
    changed = replace(state, **({"container": replace(state.container, **of_container)} if of_container else own))
    after = NodeClient(client.hosts, {})
    monkeypatch.setattr(NodeClient, "of", lambda _: after)
    assert containers.ensure_up(NodeClient(client.hosts, {**client.states, "b": changed})) == ("brought up", after)


class Keyless:
    """A host that has other keys than it should, and may have no room for its own."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.ran = full, list[str]()

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        assert timeout is not None
        self.ran.append(command.render())
        failed = self.full and command.stdin is not None
        return Completed(int(failed), b"", b"No space left on device" if failed else b"", "a command")


def test_no_node_starts_before_every_host_has_its_keys(client: NodeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {node: HostState(FACTS, IMAGE, None, None) for node in client.hosts}
    hosts = {"a": Keyless(), "b": Keyless(full=True)}
    without = NodeClient(Hosts(client.cluster, hosts), states)  # type: ignore[arg-type]
    monkeypatch.setattr(containers.NodeClient, "of", lambda _: without)
    lock = Unlocked(without.hosts)
    with pytest.raises(ClusterError, match="No space left on device"):
        containers._up(without, lock, IMAGE)
    assert [len(host.ran) for host in hosts.values()] == [1, 1]
    hosts["b"].full = False
    containers._up(without, lock, IMAGE)
    assert all(len(host.ran) == 4 and "docker run" in host.ran[2] for host in hosts.values())


def test_a_node_does_not_start_on_a_disk_that_is_read_only(client: NodeClient, tmp_path: Path) -> None:
    facts = replace(FACTS, home=str(tmp_path / "home"))
    state = replace(client.states["a"], facts=facts, container=None)
    alone = NodeClient(client.hosts, {**client.states, "a": state})
    workspace = Path(client.hosts.transport.workspace(facts))
    for name in ("data", "runs"):
        (workspace / name).mkdir(parents=True)
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    read_only = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; shift; PATH=$1:$PATH; shift; "$@"'

    def run(_: str, command: Command, timeout: float) -> Completed:
        start = ["sh", "-c", read_only, "sh", str(workspace), str(tmp_path), *command.argv]
        words = ["unshare", "--user", "--map-root-user", "--mount", *start]
        done = subprocess.run(words, capture_output=True, timeout=timeout, check=False)
        if done.returncode == 77 or b"unshare" in done.stderr:
            pytest.skip(f"no mounts here: {done.stderr.decode()}")
        return Completed(done.returncode, done.stdout, done.stderr)

    host, lock = Mock(run=Mock(return_value=Completed(0, b"", b""))), Mock(run=run)
    with pytest.raises(ClusterError, match=r"a: .*; got touch: .*: Read-only file system; choose another folder there"):
        containers._start(alone, lock, SshTransport(client.cluster), "a", host, IMAGE)


def test_a_health_check_that_cannot_run_is_not_taken_for_sshds_silence(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "READY_TIMEOUT_S", -1.0)
    full = b"OCI runtime exec failed: open /tmp/runc-process: no space left on device"
    answers = [Completed(126, b"", full), Completed(0, b"true\n", b"")]
    with pytest.raises(ClusterError) as caught:
        containers._wait_ready(client, "a", Mock(run=Mock(side_effect=answers)))
    assert str(caught.value) == (
        f"a: `its health check` failed with exit code 126; got {full.decode()}; "
        "free some space there (docker system df shows Docker's share; df -i the inodes)"
    )


def test_a_twin_without_the_compose_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("lab", "node-0 slots=1\n"), ("lab.yaml", "transport: compose\n"), ("docker-compose.yml", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "docker").write_text("#!/bin/sh\necho \"unknown shorthand flag: 'p' in -p\" >&2; exit 125\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = Hosts(load_cluster(tmp_path / "lab", project_folder=tmp_path))
    hosts.cluster.state_folder.mkdir(parents=True)
    twin = NodeClient(hosts, {"node-0": HostState(FACTS, IMAGE, None, None)})
    with pytest.raises(ClusterError) as caught:
        containers._compose(twin, Unlocked(hosts), (), {}, "up")
    assert str(caught.value) == (
        "docker compose: the Compose plugin is missing on this machine; got unknown shorthand flag: 'p' in -p; install "
        "docker-compose-plugin (Debian and Ubuntu with Docker's packages) or docker-compose-v2 (Ubuntu's own)"
    )
