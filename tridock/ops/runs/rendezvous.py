"""Nodes that were started one by one (`NODE_RANK`) agree on one run before any rank starts.

Node 0 listens on the port that the ranks will use afterwards; each other node says who it is and what it is about to
run. All get the run's id, or all get every reason why this cannot be one run. One line of JSON each way.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from tridock.contracts.codec import decode, encode
from tridock.errors import ClusterError, Problem, RequestError

PATIENCE_S = 300.0
_RETRY_S = 0.5
_LINE_LIMIT = 1 << 16
_WORD_S = 10.0

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a node is about to run. All but ``node_rank`` must be the same on every node."""

    node_rank: int
    nnodes: int
    nproc: int
    experiment_sha256: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What node 0 answers to all: the run's id, or why this cannot be one run."""

    run_id: str
    problems: tuple[Problem, ...]


def lead(port: int, terms: Terms, run_id: str, say: Say, patience: float = PATIENCE_S) -> None:
    """What node 0 does: waits for the others and gives them the run's id.

    Raises :class:`RequestError` where their terms differ, :class:`ClusterError` where they do not come in time.
    """
    missing = set(range(1, terms.nnodes))
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(port))
        peers: list[socket.socket] = []
        problems: list[Problem] = []
        say(f"waiting for {len(missing)} more nodes on port {port}")
        while missing and not problems:
            peer = _accept(server, deadline, missing, port)
            stack.enter_context(peer)
            try:
                theirs = decode(Terms, _read_line(peer, time.monotonic() + _WORD_S))
            except (ValueError, OSError):
                continue  # a port scanner, a health check: not one of us
            peers.append(peer)
            problems = _differences(terms, theirs, missing)
            missing.discard(theirs.node_rank)
        for peer in peers:
            with contextlib.suppress(OSError):  # one that has gone meanwhile is missed by the ranks
                peer.sendall(f"{encode(Answer(run_id, tuple(problems)))}\n".encode())
        if problems:
            raise RequestError(problems)


def follow(address: str, port: int, terms: Terms, say: Say, patience: float = PATIENCE_S) -> str:
    """What every other node does: tells node 0 its terms; gives the run's id."""
    deadline = time.monotonic() + patience
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
    texts = {
        "nnodes": ("counts another number of nodes than node 0", "give the same number everywhere"),
        "nproc": ("starts another number of ranks than node 0", "give the same number everywhere"),
        "experiment_sha256": (
            "has another experiment than node 0",
            "give the same file and the same changes everywhere",
        ),
    }
    return [
        Problem(where, texts[field.name][0], _values(field.name, ours, theirs), texts[field.name][1])
        for field in fields(Terms)
        if field.name in texts and getattr(ours, field.name) != getattr(theirs, field.name)
    ]


def _values(name: str, ours: Terms, theirs: Terms) -> str:
    theirs_, ours_ = (str(getattr(terms, name))[:12] for terms in (theirs, ours))
    return f"{theirs_}, not {ours_}"


def _listen(port: int) -> socket.socket:
    try:
        # On every address of both families, where the machine has both.
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        pass
    try:
        return socket.create_server(("", port))
    except OSError as error:
        todo = "end what listens there, or set launch.master_port (MASTER_PORT) to another, on every node"
        raise ClusterError(Problem(f"port {port}", "cannot be opened for listening", _reason(error), todo)) from None


def _accept(server: socket.socket, deadline: float, missing: set[int], port: int) -> socket.socket:
    try:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        return server.accept()[0]
    except TimeoutError:
        ranks = ", ".join(str(rank) for rank in sorted(missing))
        what, todo = f"the nodes of rank {ranks} did not come to port {port}", "start them, with this node's address"
        raise ClusterError(Problem("rendezvous", what, "nothing", f"{todo} as MASTER_ADDR")) from None


def _connect(address: str, port: int, deadline: float, say: Say) -> socket.socket:
    waiting = False
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.01, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                todo = "start node 0 there, and open this port between the nodes"
                raise ClusterError(
                    Problem(f"{address}:{port}", "node 0 does not answer", _reason(error), todo)
                ) from None
            if not waiting:
                say(f"waiting for node 0 at {address}:{port}")
            waiting = True
            time.sleep(_RETRY_S)


def _read_line(connection: socket.socket, deadline: float) -> str:
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(4096)
        if not part or len(line) > _LINE_LIMIT:
            raise ConnectionError("the connection was closed")
        line += part
    return line.decode()


def _reason(error: OSError) -> str:
    # A name that is not known has a number of its own, below 0.
    number = error.errno or 0
    return (os.strerror(number) if number > 0 else error.strerror or str(error)).lower()
