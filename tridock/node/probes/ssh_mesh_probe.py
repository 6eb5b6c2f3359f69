"""Connects from the head to every node, itself included, over ssh as pdsh does, all nodes at once."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from tempfile import TemporaryFile
from typing import Final, TypeVar

from tridock.contracts import cluster_ssh
from tridock.contracts.codec import decode, encode
from tridock.contracts.mesh_answers import Clock, Hello, MeshAnswer, MeshRequest, Network, Peer, PeerProbe, Time
from tridock.contracts.node_answers import SshAnswer
from tridock.node.probes import mesh_responder

_TIMEOUT_S: Final = 12.0
_ROUNDS: Final = 3

T = TypeVar("T")


def greet_nodes(nodes: list[str]) -> dict[str, SshAnswer]:
    """Returns the answer of each node's sshd."""

    def greet(node: str) -> SshAnswer:
        try:
            done = subprocess.run(
                [*cluster_ssh.PROBE, node, mesh_responder.greeting()],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return SshAnswer(None, _text(error.stdout), _text(error.stderr))
        return SshAnswer(done.returncode, _text(done.stdout), _text(done.stderr))

    return _concurrently(nodes, greet)


def probe_mesh(addresses: Mapping[str, str], token: str) -> dict[str, MeshAnswer]:
    """Connects to every node, and makes those that answer probe each other: clocks, interfaces, routes, shared folders.

    ``addresses`` holds the address at which the others reach each node.
    """
    connections = {node: _Connection(node, token) for node in addresses}
    try:
        answers = _concurrently(list(connections), lambda node: connections[node].greet())
        peers = {
            node: Peer(addresses[node], answer.hello.port, _addresses(answer.hello.network))
            for node, answer in answers.items()
            if answer.hello is not None
        }
        probes = _concurrently(
            list(peers), lambda node: connections[node].probe({at: peers[at] for at in peers if at != node})
        )
        return {node: replace(answers[node], peers=probes.get(node)) for node in addresses}
    finally:
        _concurrently(list(connections), lambda node: connections[node].close())


def _addresses(network: Network) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chosen.address for chosen in network.chosen.values() if chosen is not None))


def _concurrently(nodes: list[str], action: Callable[[str], T]) -> dict[str, T]:
    if not nodes:
        return {}
    with ThreadPoolExecutor(len(nodes)) as pool:
        return dict(zip(nodes, pool.map(action, nodes), strict=True))


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")


class _Connection:
    """One ssh connection to a node; a step that exceeds its timeout kills the connection."""

    def __init__(self, node: str, token: str) -> None:
        # A file, as a pipe would have to be drained continuously.
        self._errors = TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [*cluster_ssh.PROBE, node, mesh_responder.command(token)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip

    @contextmanager
    def _timeout(self) -> Iterator[None]:
        timer = threading.Timer(_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def greet(self) -> MeshAnswer:
        """Reads the greeting and, from a node, its responder's first line and its clock."""
        code: int | None = 0
        hello = clock = None
        with self._timeout():
            greeting = self._line()
            try:
                hello, clock = decode(Hello, self._line()), self._clock()
            except (ValueError, OSError):
                code = self._end()
        self._errors.seek(0)
        return MeshAnswer(SshAnswer(code, greeting, _text(self._errors.read())), hello, clock)

    def probe(self, peers: Mapping[str, Peer]) -> PeerProbe | None:
        """Returns this node's findings about the others."""
        with self._timeout(), suppress(ValueError, OSError):
            return self._ask(MeshRequest(peers), PeerProbe)
        return None

    def _clock(self) -> Clock:
        """Returns the fastest of several requests; as in NTP, the remote clock counts as read half a round trip after
        the request.
        """
        samples = []
        for _ in range(_ROUNDS):
            sent = time.time()
            remote = self._ask(MeshRequest(), Time).time
            received = time.time()
            samples.append((received - sent, remote - (sent + received) / 2))
        round_trip, offset = min(samples)
        return Clock(offset, round_trip / 2)

    def _ask(self, request: MeshRequest, kind: type[T]) -> T:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{encode(request)}\n".encode())
        self._process.stdin.flush()
        return decode(kind, self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return _text(self._process.stdout.readline())

    def _end(self) -> int | None:
        """Returns the exit code; None if it was killed."""
        with suppress(OSError):
            self._close_input()
        code = self._process.wait()
        return code if code >= 0 else None

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Ends the responder and the connection."""
        with self._timeout():
            self._end()
        self._errors.close()
