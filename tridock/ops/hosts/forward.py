"""A port of this machine that leads to a port inside a node's container, whatever network that has."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tridock.command import Command
from tridock.contracts.run_folder import PYTHON
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.client import NodeClient

_LOOPBACK: Final = "127.0.0.1"
_PROBE_S: Final = 30.0
_RELAY: Final = """
import os, select, socket, sys, threading
port = int(sys.argv[1])
try:
    there = socket.create_connection(("localhost", port), 10)
except OSError as error:
    sys.exit(f"port {port}: {error.strerror or error}")
if sys.argv[2:]:
    sys.exit()
there.settimeout(None)
ended = []

def send():
    while part := os.read(0, 65536):
        there.sendall(part)
    there.shutdown(socket.SHUT_WR)
    ended.append(True)

threading.Thread(target=send, daemon=True).start()
while (ready := select.select([there], [], [], 60)[0]) or not ended:
    if ready:
        if not (part := there.recv(65536)):
            break
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
"""
"""Inside the node: one connection, between standard input and output and a port. Without input, a silence ends it."""


def forward(client: NodeClient, node: str, port: int, local: int, ready: Callable[[str], None]) -> None:
    """Forwards ``local`` (0: any free port) until the host is lost, which raises; calls ``ready`` with the address.

    Each connection is a command in the node, over ssh as all others: sshd has no port to forward.
    """
    host, relay = client.hosts[node], (PYTHON, "-P", "-c", _RELAY, str(port))
    probe = client.run_inside(node, *relay, "probe", timeout=_PROBE_S)
    if probe.exit_code == 1:  # of a Python program that says why it ends
        got = probe.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ClusterError(Problem(node, "nothing listens there on localhost", got, "start the program there first"))
    probe.checked(node)
    try:
        server = socket.create_server((_LOOPBACK, local))
    except OSError as error:
        got, todo = f"{local}: {os.strerror(error.errno or 0).lower()}", "give another after PORT; 0 is any free one"
        raise RequestError(Problem("LOCAL_PORT", "cannot be used on this machine", got, todo)) from None
    line, relays = host.rsh(client.inside(node, *relay, interactive=True)), list[subprocess.Popen[bytes]]()
    # An open command keeps the connection to the host, and ends with it.
    with server, host.start(Command.of("cat"), lambda _: None) as held:
        ready(f"{_LOOPBACK}:{server.getsockname()[1]}")
        server.settimeout(1.0)
        try:
            while not held.has_ended():
                with suppress(TimeoutError), server.accept()[0] as connection:
                    argv, fd = ("sh", "-c", line, "relay"), connection.fileno()
                    relays.append(subprocess.Popen(argv, stdin=fd, stdout=fd, start_new_session=True))
                relays = [it for it in relays if it.poll() is None]
            held.wait()
        finally:
            for process in relays:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
