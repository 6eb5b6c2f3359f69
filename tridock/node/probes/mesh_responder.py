"""Answers the head's mesh probe on a node, over ssh: one JSON object per line in both directions; sends the first.

It ends when the caller disconnects.
"""

import hashlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tridock.contracts import environment, run_folder
from tridock.contracts.codec import decode, encode
from tridock.contracts.mesh_answers import (
    ChosenInterface,
    Hello,
    Interface,
    MeshRequest,
    Network,
    Peer,
    PeerProbe,
    Route,
    Time,
    Unreached,
)
from tridock.node.probes import interfaces as net

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

    ``token`` marks the files and the listener of this probe.
    """
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGHUP, _exit)
    signal.signal(signal.SIGALRM, _exit)
    signal.alarm(_LIFE_S)  # a caller that hangs must not leave this process behind
    node = os.environ.get(environment.NODE, "")
    with _listening(f"{token} {node}\n".encode()) as port, _probe_file(workspace, token, node):
        _print(Hello(shared_environment(os.environ, token), _network(), port))
        for line in sys.stdin:
            peers = decode(MeshRequest, line).peers
            _print(Time(time.time()) if peers is None else _probe_peers(peers, token, workspace))
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


def _network() -> Network:
    found = net.interfaces()
    gloo, address = net.gloo_choice(found, os.environ.get("GLOO_SOCKET_IFNAME"), net.own_addresses())
    nccl = net.nccl_choice(found, os.environ.get("NCCL_SOCKET_IFNAME"))
    chosen = {"gloo": _chosen(gloo, address), "nccl": _chosen(nccl, nccl.addresses[0] if nccl else "")}
    return Network(found, chosen, {name: os.environ.get(f"{name.upper()}_SOCKET_IFNAME") for name in chosen})


def _chosen(interface: Interface | None, address: str) -> ChosenInterface | None:
    return None if interface is None else ChosenInterface(interface.name, interface.mtu, address)


def _probe_peers(peers: Mapping[str, Peer], token: str, workspace: Path) -> PeerProbe:
    targets = [(node, address, peer.port) for node, peer in peers.items() for address in peer.listens]
    with ThreadPoolExecutor(32) as pool:
        errors = pool.map(lambda it: _connect(it[1], it[2], f"{token} {it[0]}"), targets)
        unreached = [
            Unreached(node, address, error) for (node, address, _), error in zip(targets, errors, strict=True) if error
        ]
    routes = {node: _route(peer.address) for node, peer in peers.items()}
    return PeerProbe(
        tuple(unreached), routes, tuple(node for node in peers if _probe_path(workspace, token, node).exists())
    )


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


def _probe_path(workspace: Path, token: str, node: str) -> Path:
    return workspace / "runs" / f".tridock-probe-{token}-{node}"


@contextmanager
def _probe_file(workspace: Path, token: str, node: str) -> Iterator[None]:
    """Creates an empty file that the other nodes see if they share the workspace."""
    path = _probe_path(workspace, token, node)
    try:
        with suppress(OSError):  # the node report names a folder that cannot be written
            path.touch()
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def command(token: str) -> str:
    """Returns the command line for ssh: a greeting from the shell, then this program."""
    respond = f"{run_folder.PYTHON} -P -m tridock.node mesh-respond {token} --workspace {run_folder.WORKSPACE}"
    return f"{greeting()} && exec {respond}"


def greeting() -> str:
    """Returns the command line that prints the sshd's node: a host's own sshd lacks these variables."""
    return f'echo "tridock-node ${{{environment.CLUSTER}:-}} ${{{environment.NODE}:-}}"'
