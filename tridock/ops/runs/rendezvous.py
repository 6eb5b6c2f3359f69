"""Lets nodes that were started one by one (`NODE_RANK`) agree on one run before any rank starts.

Node 0 listens on the port that the ranks will use afterwards. Each other node sends its rank and terms. All receive the
run's id, or every reason why they cannot form one run. Each message is one line of JSON.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tridock.contracts.codec import decode, encode
from tridock.errors import ClusterError, Problem, RequestError
from tridock.remote import clock

PATIENCE_S = 300.0
_RETRY_S = 0.5
_LINE_LIMIT = 1 << 16
_WORD_S = 10.0

Say = Callable[[str], object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Terms:
    """The run that a node is about to start. All fields but ``node_rank`` must be the same on every node."""

    node_rank: int
    nnodes: int
    nproc: int
    experiment_sha256: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Node 0's answer to all: the run's id, or why they cannot form one run."""

    run_id: str
    problems: tuple[Problem, ...]


def lead(port: int, terms: Terms, run_id: str, say: Say, patience: float = PATIENCE_S) -> None:
    """Waits for the other nodes and sends them the run's id; called on node 0.

    Raises :class:`RequestError` if their terms differ, :class:`ClusterError` if they do not join in time.
    """
    missing = set(range(1, terms.nnodes))
    deadline = clock.now() + patience
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(port))
        peers: list[socket.socket] = []
        problems: list[Problem] = []
        say(f"waiting for {len(missing)} more nodes on port {port}")
        while missing and not problems:
            peer = _accept(server, deadline, missing, port)
            stack.enter_context(peer)
            try:
                theirs = decode(Terms, _read_line(peer, clock.now() + _WORD_S))
            except (ValueError, OSError):
                continue  # a port scanner or health check, not a node
            peers.append(peer)
            problems = _differences(terms, theirs, missing)
            missing.discard(theirs.node_rank)
        for peer in peers:
            with contextlib.suppress(OSError):  # the ranks will notice a node that has disappeared
                peer.sendall(f"{encode(Answer(run_id, tuple(problems)))}\n".encode())
        RequestError.raise_for(problems)


def follow(address: str, port: int, terms: Terms, say: Say, patience: float = PATIENCE_S) -> str:
    """Sends node 0 this node's terms; returns the run's id. Called on every other node."""
    deadline = clock.now() + patience
    with _connect(address, port, deadline, say) as leader:
        leader.sendall(f"{encode(terms)}\n".encode())
        try:
            answer = decode(Answer, _read_line(leader, deadline))
        except (ValueError, OSError) as error:
            what = "node 0 went away before every node had come"
            todo = "see its output, then start all nodes again"
            raise ClusterError(Problem(f"{address}:{port}", what, str(error), todo)) from None
    if answer.problems:
        raise RequestError(answer.problems)
    return answer.run_id


def _differences(ours: Terms, theirs: Terms, missing: set[int]) -> list[Problem]:
    where = f"node {theirs.node_rank}"
    if theirs.node_rank not in missing:
        free = ", ".join(str(rank) for rank in sorted(missing)) or "none"
        todo = "give every node a rank of its own"
        return [Problem(where, "this rank is taken or not one of the nodes", f"free are {free}", todo)]
    terms = (
        (theirs.nnodes, ours.nnodes, "counts another number of nodes", "number"),
        (theirs.nproc, ours.nproc, "starts another number of ranks", "number"),
        (
            theirs.experiment_sha256[:12],
            ours.experiment_sha256[:12],
            "has another experiment",
            "file and the same changes",
        ),
    )
    return [
        Problem(where, f"{what} than node 0", f"{own}, not {first}", f"give the same {todo} everywhere")
        for own, first, what, todo in terms
        if own != first
    ]


def _listen(port: int) -> socket.socket:
    try:
        # On all addresses of both families, if the machine has both.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        todo = "end what listens there, or set launch.master_port (MASTER_PORT) to another, on every node"
        raise ClusterError(Problem(f"port {port}", "cannot be opened for listening", _reason(error), todo)) from None


def _accept(server: socket.socket, deadline: float, missing: set[int], port: int) -> socket.socket:
    try:
        return _awaited(server, server.accept, deadline)[0]
    except TimeoutError:
        ranks = ", ".join(str(rank) for rank in sorted(missing))
        what, todo = f"the nodes of rank {ranks} did not come to port {port}", "start them, with this node's address"
        raise ClusterError(Problem("rendezvous", what, "nothing", f"{todo} as MASTER_ADDR")) from None


def _connect(address: str, port: int, deadline: float, say: Say) -> socket.socket:
    waiting = False
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.01, deadline - clock.now()))
        except OSError as error:
            if clock.now() + _RETRY_S > deadline:
                todo = "start node 0 there, and open this port between the nodes"
                what = "node 0 does not answer"
                raise ClusterError(Problem(f"{address}:{port}", what, _reason(error), todo)) from None
            if not waiting:
                say(f"waiting for node 0 at {address}:{port}")
            waiting = True
            time.sleep(_RETRY_S)


def _read_line(connection: socket.socket, deadline: float) -> str:
    line = b""
    while not line.endswith(b"\n"):
        part = _awaited(connection, lambda: connection.recv(4096), deadline)
        if not part or len(line) > _LINE_LIMIT:
            raise ConnectionError("the connection was closed")
        line += part
    return line.decode()


def _awaited(on: socket.socket, action: Callable[[], T], deadline: float) -> T:
    """Returns what an action on a socket does. Raises :class:`TimeoutError` after the deadline."""
    while True:
        on.settimeout(max(0.01, clock.turn(deadline)))
        try:
            return action()
        except TimeoutError:
            if clock.now() >= deadline:
                raise


def _reason(error: OSError) -> str:
    # An unknown name has an error number of its own, below 0.
    number = error.errno or 0
    return (os.strerror(number) if number > 0 else error.strerror or str(error)).lower()
