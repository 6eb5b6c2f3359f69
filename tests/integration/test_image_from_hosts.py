"""Hosts that fetch pieces of an image from each other, over real sshds; three folders play the hosts."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.sshd import SSHD, running
from tridock.command import Command
from tridock.contracts.run_folder import RENDEZVOUS_PORTS
from tridock.errors import ClusterError
from tridock.ops.hosts.session import Session
from tridock.ops.image import archive
from tridock.ops.image.archive import ImageParts, digest_of
from tridock.ops.image.distribute import Distribution
from tridock.ops.image.peers import KEYS, Peers
from tridock.ops.image.schedule import OPERATOR, SLOTS
from tridock.ops.image.transfer import Delivery, Inventory
from tridock.progress import bars
from tridock.remote import Completed, LocalHost
from tridock.remote.host import lost

pytestmark = pytest.mark.skipif(SSHD is None, reason="no sshd on this machine")

HOSTS = ("host-a", "host-b", "host-c")
PIECE = 60_000
STOCK = Inventory({}, "", {}, None, None)
# The engine of the host whose folder it runs in.
DOCKER = "#!/bin/sh\ncat >loaded\n"


class FolderHost(LocalHost):
    """A host whose commands run in its folder, and pass through ``change``, which may raise."""

    def __init__(self, folder: Path, change: Callable[[Command], Command] = lambda it: it) -> None:
        super().__init__(folder.name)
        self._folder, self._change = folder, change

    def _carry_out(self, command: Command, *arguments: Any) -> Completed:
        return super()._carry_out(replace(self._change(command), cwd=str(self._folder)), *arguments)


@dataclass
class Lab:
    session: Session
    parts: ImageParts
    folder: Path
    notes: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)

    def delivery(self, node: str) -> Delivery:
        return Delivery(node, self.session.hosts[node], f"{self.folder}/{node}/arrives/me", f"{self.folder}/{node}/ids")

    def spoil(self, node: str, change: Callable[[Command], Command]) -> None:
        self.session.hosts = {**self.session.hosts, node: FolderHost(self.folder / node, change)}

    def distribute(self) -> None:
        deliveries = {node: self.delivery(node) for node in self.session.hosts}
        inventories = {node: delivery.inventory() for node, delivery in deliveries.items()}
        whole = self.parts.archive("lab", 0, 10)
        with bars(quiet=True) as begin:
            made = Distribution(
                self.session,
                deliveries,
                dict.fromkeys(deliveries, whole),
                dict.fromkeys(deliveries, ("sha256:1",)),
                begin,
                self.notes.append,
                lambda node, _: self.arrived.append(node),
            )
            self.sent = made.sent
            made.run(self.parts, dict.fromkeys(deliveries, 0), inventories)

    @property
    def archive(self) -> bytes:
        whole = self.parts.archive("lab", 0, 10)
        return b"".join(p if isinstance(p, bytes) else b"".join(p.chunks()) for p in whole.parts)

    def loaded(self, node: str) -> bool:
        path = self.folder / node / "loaded"
        return path.exists() and path.read_bytes() == self.archive

    def left(self) -> list[str]:
        """What is left on the hosts, of files and of processes."""
        files = [str(path) for node in HOSTS for path in (self.folder / node).glob("arrives*")]
        return files + running(str(self.folder))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(archive, "_SMALLEST_PIECE", PIECE)
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    folder = tmp_path / "layers"
    folder.mkdir()
    layers = []
    for size in (300_000, 100_000, 5):
        content = random.Random(size).randbytes(size)
        layers.append({"digest": digest_of(content), "size": size})
        (folder / digest_of(content)).write_bytes(content)
    manifest = json.dumps({"mediaType": "m", "config": {"digest": digest_of(b"{}")}, "layers": layers})
    for node in HOSTS:
        (tmp_path / node).mkdir()
    (tmp_path / "lab").write_text("".join(f"{node} slots=1\n" for node in HOSTS))
    nodes = {node: {"address": f"127.0.0.{number}"} for number, node in enumerate(HOSTS, 2)}
    (tmp_path / "lab.yaml").write_text(json.dumps({"nodes": nodes}))
    session = Session.open(tmp_path / "lab")
    session.hosts = {node: FolderHost(tmp_path / node) for node in HOSTS}
    return Lab(session, ImageParts(b"{}", manifest.encode(), folder), tmp_path)


def test_the_operator_sends_one_copy_and_the_hosts_the_rest(lab: Lab) -> None:
    lab.distribute()
    assert sorted(lab.arrived) == list(HOSTS)
    assert [lab.loaded(node) for node in HOSTS] == [True] * 3
    assert lab.sent[OPERATOR] == 400_000
    assert sum(lab.sent[node] for node in HOSTS) == 800_000
    assert lab.notes == []
    assert (lab.folder / "host-a/ids").read_text() == "sha256:1\n"
    assert lab.left() == []


def test_a_host_that_dies_in_the_middle_fails_alone(lab: Lab) -> None:
    """Its sshd is killed, and all that it runs ends with its connection, when it is to get its fourth piece."""
    gets = iter(range(100))

    def die(command: Command) -> Command:
        if command.argv[3] in ("receive", "fetch") and next(gets) >= 3:
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((lab.folder / "host-b/arrives/me" / KEYS / "pid").read_text()), signal.SIGKILL)
            raise ClusterError(lost("host-b", "the image arrived", "reset by peer"))
        return command

    lab.spoil("host-b", die)
    with pytest.raises(ClusterError) as caught:
        lab.distribute()
    assert str(caught.value).splitlines()[0] == (
        "host-b: the connection was lost while the image arrived; got reset by peer; "
        "check whether the host is up, then try again"
    )
    assert sorted(lab.arrived) == ["host-a", "host-c"]
    assert [lab.loaded(node) for node in HOSTS] == [True, False, True]
    # Nothing more is started on it.
    assert next(gets) <= 3 + SLOTS
    # What it alone had went out once more: three pieces at most.
    assert 400_000 <= lab.sent[OPERATOR] <= 400_000 + 3 * PIECE
    assert lab.left() == [str(lab.folder / "host-b/arrives")]
    assert not (lab.folder / "host-b/arrives/me" / KEYS).exists()
    # The next command sends only the missing pieces.
    lab.session.hosts = {"host-b": FolderHost(lab.folder / "host-b")}
    lab.distribute()
    assert lab.loaded("host-b")
    assert 400_000 - 3 * PIECE <= lab.sent[OPERATOR] < 400_000
    assert lab.left() == []


def test_hosts_that_cannot_reach_each_other_get_all_from_here(lab: Lab) -> None:
    def without_ssh(command: Command) -> Command:
        argv = ["false" if word == "ssh" and place > 6 else word for place, word in enumerate(command.argv)]
        return Command((*argv,), stdin=command.stdin)

    for node in HOSTS:
        lab.spoil(node, without_ssh)
    lab.distribute()
    assert [lab.loaded(node) for node in HOSTS] == [True] * 3
    assert lab.sent == {OPERATOR: 1_200_000}
    assert lab.notes == ["the hosts cannot fetch from each other, each gets all layers from here: exit code 1"]
    assert lab.left() == []


def test_a_host_without_an_ssh_client_gets_all_from_here_and_gives(lab: Lab) -> None:
    def without_ssh(command: Command) -> Command:
        argv = ["no-such-ssh" if word == "ssh" and place > 6 else word for place, word in enumerate(command.argv)]
        return Command((*argv,), stdin=command.stdin)

    lab.spoil("host-a", without_ssh)
    lab.distribute()
    assert [lab.loaded(node) for node in HOSTS] == [True] * 3
    assert lab.sent["host-a"] > 0
    (note,) = lab.notes
    assert re.fullmatch(
        r"host-a: got layers from here, it could not fetch them from other hosts: .*no-such-ssh: not found", note
    )


def test_hosts_without_an_sshd_give_nothing(lab: Lab) -> None:
    def without_sshd(command: Command) -> Command:
        if "serve" not in command.argv[:4]:
            return command
        return Command(tuple(word.replace("command -v sshd", "command -v no-such-sshd") for word in command.argv))

    lab.spoil("host-a", without_sshd)
    lab.distribute()
    assert lab.notes == ["host-a: gives no layers to other hosts: it has no sshd program"]
    assert lab.sent["host-a"] == 0
    assert lab.sent[OPERATOR] == 400_000  # it fetches all the same
    for node in HOSTS:
        lab.spoil(node, without_sshd)
    lab.notes.clear()
    lab.distribute()
    reason = "it has no sshd program"
    assert lab.notes == [f"the hosts cannot fetch from each other, each gets all layers from here: {reason}"]
    assert [lab.loaded(node) for node in HOSTS] == [True] * 3


def test_bytes_that_were_changed_on_a_host_are_fetched_from_elsewhere(lab: Lab) -> None:
    """A host that gives other bytes than it got: each is checked where it arrives."""

    def corrupt(command: Command) -> Command:
        if "serve" not in command.argv[:4]:
            return command
        folder = lab.folder / "host-b/arrives/me" / KEYS
        (folder / "give").write_text("echo other bytes\n")
        return command

    lab.spoil("host-b", corrupt)
    lab.distribute()
    assert [lab.loaded(node) for node in HOSTS] == [True] * 3
    assert lab.sent["host-b"] == 0


def test_an_image_that_docker_refuses_is_removed_and_the_others_continue(lab: Lab) -> None:
    script = DOCKER.replace("cat ", 'case $PWD in */host-b) echo "no space left on device" >&2; exit 1;; esac; cat ')
    (lab.folder / "bin/docker").write_text(script)
    with pytest.raises(ClusterError) as caught:
        lab.distribute()
    assert str(caught.value).splitlines()[0] == (
        "host-b: `docker load --quiet` failed with exit code 1; got no space left on device; "
        "free some space there (docker system df shows Docker's share)"
    )
    assert sorted(lab.arrived) == ["host-a", "host-c"]
    assert lab.left() == []


def test_the_sshd_of_a_host_gives_pieces_and_nothing_else(lab: Lab) -> None:
    """It has one key, which opens no shell, no other file and no tunnel; it ends with the operator's command."""
    folders = {node: lab.delivery(node).folder for node in HOSTS}
    for node in HOSTS:
        Path(folders[node]).mkdir(parents=True)
        (Path(folders[node]) / "ab.0").write_bytes(b"a piece")
    outside = Path(lab.folder, "id")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", outside], check=True)
    ended: list[str] = []

    def ask(*command: str, key: str = "", options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        keys = f"{folders['host-b']}/{KEYS}"
        program, *rest = peers.piece_servers["host-a"].command(keys)
        argv = [program, *options, *(word.replace(f"{keys}/id", key or f"{keys}/id") for word in rest), *command]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr.strip()

    with Peers(lab.session, folders, ended.append) as peers:
        assert peers.problems == {}
        assert ask("ab.0") == (0, "a piece", "")
        refused = (1, "", "gives pieces only")
        for request in ("", "ssh/id", "../../ids", "..", "./ab.0", "ab.0; id", "$(id)", "part-0", "-n"):
            assert ask(*([request] if request else [])) == refused, request
        assert ask("ab.1")[:2] == (1, "")
        code, _, error = ask("ab.0", key=str(outside))
        assert (code, "Permission denied" in error) == (255, True)
        code, _, error = ask("ab.0", options=("-oStrictHostKeyChecking=yes", "-oHostKeyAlias=host-2"))
        assert (code, "Host key verification failed" in error) == (255, True)
        assert {path.stat().st_mode & 0o077 for path in Path(folders["host-a"], KEYS).iterdir()} == {0}
        assert len(running(str(lab.folder))) >= 3
    assert running(str(lab.folder)) == []
    assert not any(Path(folder, KEYS).exists() for folder in folders.values())
    assert ended == []


def test_ports_that_are_taken_are_passed_over(lab: Lab) -> None:
    folders = {node: lab.delivery(node).folder for node in HOSTS[:1]}
    with (
        socket.create_server(("", lab.session.cluster.settings.ssh_port)) as _,
        Peers(lab.session, folders, lambda _: None) as peers,
    ):
        assert peers.piece_servers["host-a"].port in RENDEZVOUS_PORTS
