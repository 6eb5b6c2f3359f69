"""Connects from the head to every node, itself included, over ssh as pdsh does, all at once; nodes answer here."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from tridock.contracts import cluster_ssh, environment, run_folder
from tridock.contracts.codec import decode, encode
from tridock.contracts.mesh_answers import (
    Clock,
    Hello,
    MeshAnswer,
    MeshRequest,
    Peer,
    PeerProbe,
    Route,
    Time,
    Unreached,
)
from tridock.contracts.network import Network
from tridock.contracts.node_answers import SshAnswer
from tridock.node.probes import interfaces as net
from tridock.node.probes.limits_and_space import folder_identity

CONNECT_TIMEOUT_S: Final = 3.0
_LIFE_S: Final = 60
_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_CREDENTIALS: Final = re.compile(r"://[^/\s]*@")  # as in http://user:password@proxy
# Variables of the process and of the session, and those that differ from node to node by design.
_OWN: Final = re.compile(
    r"HOME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|TERM|MAIL|LC_CTYPE|_|SSH_.*|LS_COLORS"
    rf"|{'|'.join((*environment.OF_A_NODE, *environment.OF_A_RUN))}"
)


def respond(token: str, workspace: Path) -> int:
    """Prints this node's identity and listens; then answers the caller until it disconnects. Returns the exit code.

    ``token`` marks the listener of this probe.
    """
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGHUP, _exit)
    signal.signal(signal.SIGALRM, _exit)
    signal.alarm(_LIFE_S)  # a caller that hangs must not leave this process behind
    node = os.environ.get(environment.NODE, "")
    with _listening(f"{token} {node}\n".encode()) as port:
        folder = folder_identity(workspace / "runs")
        _print(Hello(shared_environment(os.environ, token), net.network(), port, folder))
        for line in sys.stdin:
            peers = decode(MeshRequest, line).peers
            _print(Time(time.time()) if peers is None else _probe_peers(peers, token))
    return 0


def _exit(*_: object) -> None:
    raise SystemExit(0)


def _print(answer: Hello | Time | PeerProbe) -> None:
    print(encode(answer), flush=True)


def shared_environment(environment: Mapping[str, str], salt: str) -> dict[str, str]:
    """Returns the variables that should be equal on every node. A secret's value is replaced by a salted hash."""
    shared = {name: value for name, value in sorted(environment.items()) if not _OWN.fullmatch(name)}
    return {name: _masked(value, salt) if _is_secret(name, value) else value for name, value in shared.items()}


def _is_secret(name: str, value: str) -> bool:
    return _SECRET.search(name) is not None or _CREDENTIALS.search(value) is not None


def _masked(value: str, salt: str) -> str:
    return f"(secret {hashlib.sha256(f'{salt}{value}'.encode()).hexdigest()[:12]})"


def _probe_peers(peers: Mapping[str, Peer], token: str) -> PeerProbe:
    targets = [(node, address, peer.port) for node, peer in peers.items() for address in peer.listens]
    with ThreadPoolExecutor(32) as pool:
        errors = pool.map(lambda it: _connect(it[1], it[2], f"{token} {it[0]}"), targets)
        unreached = [
            Unreached(node, address, error) for (node, address, _), error in zip(targets, errors, strict=True) if error
        ]
    routes = {node: _route(peer.address) for node, peer in peers.items()}
    return PeerProbe(tuple(unreached), routes)


def _route(address: str) -> Route:
    try:
        target, source = net.route_to(address)
    except OSError as error:
        return Route(error=error.strerror or str(error))
    through = net.holder(net.interfaces(), source)
    return Route(target, source, through.name if through else None)


def _connect(address: str, port: int, expected: str) -> str | None:
    """Returns the error of a connection or a wrong peer; None if the expected node answers."""
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT_S) as connection:
            greeting = connection.makefile().readline().strip()
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None if greeting == expected else "somebody else answers there"


@contextmanager
def _listening(greeting: bytes) -> Iterator[int]:
    """Yields a port, open on all addresses, that sends ``greeting`` to every client."""
    both = socket.has_dualstack_ipv6()
    with socket.create_server(
        ("::" if both else "", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=512
    ) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    with connection, suppress(OSError):
                        connection.sendall(greeting)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def command(token: str) -> str:
    """Returns the command line for ssh: a greeting from the shell, then this program."""
    respond = f"{run_folder.PYTHON} -P -m tridock.node mesh-respond {token} --workspace {run_folder.WORKSPACE}"
    return f"{greeting()} && exec {respond}"


def greeting() -> str:
    """Returns the command line that prints the sshd's node: a host's own sshd lacks these variables."""
    return f'echo "tridock-node ${{{environment.CLUSTER}:-}} ${{{environment.NODE}:-}}"'


_TIMEOUT_S: Final = 12.0
_ROUNDS: Final = 3

T = TypeVar("T")


def greet_nodes(nodes: list[str]) -> dict[str, SshAnswer]:
    """Returns the answer of each node's sshd."""

    def greet(node: str) -> SshAnswer:
        try:
            done = subprocess.run(
                [*cluster_ssh.PROBE, node, greeting()],
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
        # A file, as a pipe would have to be drained continuously; in memory, as disks may be full.
        self._errors = os.fdopen(os.memfd_create("ssh"), "w+b")
        self._process = subprocess.Popen(
            [*cluster_ssh.PROBE, node, command(token)],
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
        """Returns the fastest of several requests; as in NTP, the remote clock is read half a round trip later."""
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
