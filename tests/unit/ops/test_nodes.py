"""A launch brings the nodes up only where one is not as it should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tridock.cluster.transports import HostFacts
from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts import nodes
from tridock.ops.hosts.facts import Container, HostState, keys_digest
from tridock.ops.hosts.keys import KeyStore
from tridock.ops.hosts.session import Session
from tridock.remote import Completed

FACTS = HostFacts(uid=1000, gid=100, home="/home/ada", gpus=0, infiniband=False)
IMAGE = "sha256:0123"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Two nodes that are all right."""
    (tmp_path / "fabfile.py").touch()
    (tmp_path / "lab").write_text("a slots=1\nb slots=1\n")
    made = Session.open(tmp_path / "lab")
    store = KeyStore(made.cluster)
    store.ensure()
    states = {}
    for node in made.nodes:
        recipe = made.transport.recipe(node, IMAGE, FACTS)
        container = Container("1", IMAGE, running=True, recipe=recipe, exit_code=0, health="healthy")
        states[node] = HostState(FACTS, IMAGE, container, keys_digest(store.node_files(node)))
    monkeypatch.setattr(made, "_states", states)
    monkeypatch.setattr(nodes, "ensure_image", lambda _: IMAGE)
    monkeypatch.setattr(nodes, "up", lambda _: "brought up")
    return made


def test_nodes_of_another_folder_are_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    state = session.states()["a"]
    assert state.container is not None
    theirs = replace(state, container=replace(state.container, workspace="/home/eve/tridock/lab/workspace"))
    monkeypatch.setattr("tridock.ops.hosts.session.parse_facts", lambda *_: theirs)
    host = Mock(read_into=Mock(return_value=Completed(0, b"", b"")))
    with pytest.raises(ClusterError) as caught:
        session.read_state("a", host)
    assert str(caught.value) == (
        "a: its container tridock-lab belongs to another folder; got /home/eve/tridock/lab/workspace, and this one's "
        "is /home/ada/tridock/lab/workspace; use that folder (workdir), or give this cluster another name: rename its "
        "hostfile"
    )


def test_hosts_that_all_answer_give_their_facts_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    states, asked = dict(session.states()), list[str]()

    def read_state(node: str, _: object) -> HostState:
        asked.append(node)
        return states[node]

    monkeypatch.setattr(session, "read_state", read_state)
    session.forget_states()
    there, failure = session.reachable()
    assert (there.states(), session.states(), failure) == (states, states, None)
    assert sorted(asked) == ["a", "b"]


def test_where_all_is_right_nothing_is_done(session: Session) -> None:
    assert nodes.ensure_up(session) == IMAGE


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
    ],
    ids=str,
)
def test_one_node_that_is_not_right_brings_all_up(session: Session, change: dict[str, Any]) -> None:
    state = session.states()["b"]
    assert state.container is not None
    own = {name: value for name, value in change.items() if name in ("container", "keys")}
    of_container = {name: value for name, value in change.items() if name not in own}
    changed = replace(state, **({"container": replace(state.container, **of_container)} if of_container else own))
    session.states()["b"] = changed
    assert nodes.ensure_up(session) == "brought up"


class Keyless:
    """A host that has other keys than it should, and may have no room for its own."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.ran = full, list[str]()

    def run(self, command: Command, timeout: float | None = None, keep: float = 0) -> Completed:
        assert timeout is not None
        assert keep == 0
        self.ran.append(command.render())
        failed = self.full and command.stdin is not None
        return Completed(int(failed), b"", b"No space left on device" if failed else b"", "a command")


def test_no_node_starts_before_every_host_has_its_keys(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_states", {node: HostState(FACTS, IMAGE, None, None) for node in session.nodes})
    hosts = {"a": Keyless(), "b": Keyless(full=True)}
    monkeypatch.setattr(session, "hosts", hosts)
    with pytest.raises(ClusterError, match="No space left on device"):
        nodes._up(session, IMAGE)
    assert [len(host.ran) for host in hosts.values()] == [1, 1]
    hosts["b"].full = False
    nodes._up(session, IMAGE)
    assert all(len(host.ran) == 3 and "docker run" in host.ran[2] for host in hosts.values())


def test_whether_a_node_is_ready_is_asked_again_after_it_got_other_keys(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.states()["b"] = replace(session.states()["b"], keys="from before a rotation")
    hosts = {"a": Keyless(), "b": Keyless()}
    monkeypatch.setattr(session, "hosts", hosts)
    ready = Completed(0, b"", b"", "a command")
    monkeypatch.setattr(session, "_answers", dict.fromkeys(session.nodes, (nodes._READY, ready)))
    nodes._up(session, IMAGE)
    assert hosts["a"].ran == []
    keys, asked = hosts["b"].ran
    assert "kill -HUP" in keys
    assert "healthcheck.sh" in asked


class Talker:
    """A host that prints the facts of a running node and the answer to a question, or is cut off there."""

    def __init__(self, answer: bytes | None, *, lost: bool = False) -> None:
        self.answer, self.lost, self.ran = answer, lost, list[tuple[str, ...]]()

    def read_into(self, sink: Any, command: Command, timeout: float, keep: float) -> Completed:
        assert (timeout, keep) == (30, 0)
        self.ran.append(command.argv)
        labels = {"tridock.workspace": "/home/ada/tridock/lab/workspace"}
        container = {"Id": "1", "Image": IMAGE, "Config": {"Labels": labels}, "State": {"Running": True, "ExitCode": 0}}
        sink(f"uid 1000\ngid 100\nhome /home/ada\n{json.dumps(container)}\n".encode())
        if self.answer is not None:
            sink(b"answer\n" + self.answer)
        if self.lost:
            raise ClusterError(Problem("a", "was lost", "", "try again"))
        return Completed(0, b"", b"", "facts")

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        self.ran.append(command.argv)
        return Completed(0, b"later", b"", "a command")


@pytest.mark.parametrize(
    ("host", "commands"),
    [(Talker(b"at once"), [1, 0, 1]), (Talker(None), [1, 1, 1]), (Talker(b"at o", lost=True), [1, 1, 1])],
    ids=["answered", "not asked", "cut off"],
)
def test_the_facts_bring_an_answer_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, host: Talker, commands: list[int]
) -> None:
    counts, answers = list[int](), list[bytes]()
    monkeypatch.setattr(session, "hosts", {"a": host})
    session.forget_states()
    session.ask_with_states("cat", "x")
    for step in (
        session.states,
        lambda: session.run_inside("a", "cat", "x"),
        lambda: session.run_inside("a", "cat", "x"),
    ):
        before, done = len(host.ran), step()
        counts.append(len(host.ran) - before)
        if isinstance(done, Completed):
            answers.append(done.stdout)
    assert counts == commands
    assert answers == [b"later" if commands[1] else b"at once", b"later"]


def test_an_answer_is_for_the_same_command_and_as_old_as_the_facts(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Talker(b"at once")
    monkeypatch.setattr(session, "hosts", {"a": host})
    session.ask_with_states("cat", "x")
    session.forget_states()
    session.states()
    assert session.run_inside("a", "cat", "y").stdout == b"later"
    assert session.run_inside("a", "cat", "x", stdin=b"").stdout == b"later"
    session.forget_states()
    host.answer = None
    assert session.run_inside("a", "cat", "x").stdout == b"later"


def test_a_host_that_is_lost_before_its_facts_are_there_fails(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "hosts", {"a": Talker(None, lost=True)})
    session.ask_with_states("cat", "x")
    session.forget_states()
    with pytest.raises(ClusterError, match="was lost"):
        session.states()
