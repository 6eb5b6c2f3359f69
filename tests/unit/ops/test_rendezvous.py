"""Nodes that were started one by one: real sockets, each node a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.patience import STEP_S
from tridock.errors import TridockError
from tridock.ops.runs.rendezvous import Terms, follow, lead

FIRST = Terms(node_rank=0, nnodes=3, nproc=4, experiment_sha256="0123456789abcdef")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        found: int = probe.getsockname()[1]
        return found


def silent(_: str) -> None:
    pass


class Node(threading.Thread):
    """A node that does its part; ``outcome`` is what it got, or the error."""

    def __init__(self, part: Callable[[], Any]) -> None:
        super().__init__()
        self.part, self.outcome = part, None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.part()
        except TridockError as error:
            self.outcome = error


def meet(port: int, *others: Terms, patience: float = STEP_S) -> list[Any]:
    leader = Node(lambda: lead(port, FIRST, "run-1", silent, patience))
    nodes = [leader, *(Node(lambda t=t: follow("127.0.0.1", port, t, silent, patience)) for t in others)]
    for node in nodes:
        node.join(STEP_S)
    return [str(node.outcome) if isinstance(node.outcome, TridockError) else node.outcome for node in nodes]


def test_all_get_the_same_run(port: int) -> None:
    assert meet(port, replace(FIRST, node_rank=2), replace(FIRST, node_rank=1)) == [None, "run-1", "run-1"]


def test_the_others_may_come_first(port: int) -> None:
    said: list[str] = []
    early = Node(lambda: follow("127.0.0.1", port, replace(FIRST, nnodes=2, node_rank=1), said.append, STEP_S))
    while not said:
        early.join(0.05)
    lead(port, replace(FIRST, nnodes=2), "run-1", silent, STEP_S)
    early.join(STEP_S)
    assert (said, early.outcome) == ([f"waiting for node 0 at 127.0.0.1:{port}"], "run-1")


def test_who_speaks_something_else_is_ignored(port: int) -> None:
    terms = replace(FIRST, nnodes=2)
    leader = Node(lambda: lead(port, terms, "run-1", silent, STEP_S))
    for message in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b""):
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=STEP_S)
                break
            except ConnectionRefusedError:
                continue
        with stranger:
            stranger.sendall(message)
    assert follow("127.0.0.1", port, replace(terms, node_rank=1), silent, STEP_S) == "run-1"
    leader.join(STEP_S)
    assert leader.outcome is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(FIRST, node_rank=1, nproc=8),
         "node 1: starts another number of ranks than node 0; got 8, not 4; give the same number everywhere"),
        (replace(FIRST, node_rank=1, nnodes=2),
         "node 1: counts another number of nodes than node 0; got 2, not 3; give the same number everywhere"),
        (replace(FIRST, node_rank=1, experiment_sha256="fedcba9876543210"),
         "node 1: has another experiment than node 0; got fedcba987654, not 0123456789ab; "
         "give the same file and the same changes everywhere"),
        (replace(FIRST, node_rank=0),
         "node 0: this rank is taken or not one of the nodes; got free are 1, 2; give every node a rank of its own"),
    ],
)  # fmt: skip
def test_terms_that_differ_stop_both_sides(port: int, other: Terms, message: str) -> None:
    assert meet(port, other) == [message, message]


def test_both_sides_hold_the_same_problems(port: int) -> None:
    leader = Node(lambda: lead(port, FIRST, "run-1", silent, STEP_S))
    other = Node(lambda: follow("127.0.0.1", port, replace(FIRST, node_rank=1, nproc=8), silent, STEP_S))
    for node in (leader, other):
        node.join(STEP_S)
    assert other.outcome.problems == leader.outcome.problems


def test_a_node_that_does_not_come(port: int) -> None:
    leader, other = meet(port, replace(FIRST, node_rank=2), patience=1.0)
    assert leader == (
        f"rendezvous: the nodes of rank 1 did not come to port {port}; got nothing; "
        "start them, with this node's address as MASTER_ADDR"
    )
    assert other.startswith(f"127.0.0.1:{port}: node 0 went away before every node had come; got ")
    assert other.endswith("; see its output, then start all nodes again")


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1", "connection refused"), ("no.such.invalid", "name or service not known")]
)
def test_node_0_that_is_not_there(port: int, address: str, reason: str) -> None:
    with pytest.raises(TridockError) as caught:
        follow(address, port, replace(FIRST, node_rank=1), silent, 0.2)
    assert str(caught.value) == (
        f"{address}:{port}: node 0 does not answer; got {reason}; "
        "start node 0 there, and open this port between the nodes"
    )


def test_a_port_that_is_taken(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(TridockError) as caught:
        lead(port, FIRST, "run-1", silent, 0.2)
    assert str(caught.value) == (
        f"port {port}: cannot be opened for listening; got address already in use; "
        "end what listens there, or set launch.master_port (MASTER_PORT) to another, on every node"
    )
