"""``tridock exec``, ``ssh`` and ``forward``: a command, a shell, or a port in a node."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tridock.cli.options import Arguments, Commands, Parser, add_command, add_hosts
from tridock.cli.output import say
from tridock.contracts import environment
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.ops.hosts.client import NodeClient

_CHUNK: Final = 1 << 16
_END: Final = r'for it in /proc/[0-9]*; do grep -qsz "^$1\$" "$it/environ" && kill "${it#/proc/}"; done; true'
"""Ends the processes that have a mark in their environment."""
_END_S: Final = 20.0


def add(commands: Commands) -> None:
    examples: tuple[str, ...] = (
        "host-a -- nvidia-smi -L",
        "host-a -- py-spy dump --pid 4242",
        "--hosts hostfile host-b -- df -h",
    )
    parser = add_command(commands, "exec", _exec, "run a command in a node", *examples)
    _add_node(parser)
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command to run")

    parser = add_command(commands, "ssh", _ssh, "open a shell in a node", "host-a", "--hosts hostfile host-b")
    _add_node(parser)

    examples = ("host-a 6006", "--hosts hostfile host-b 8888 9999")
    parser = add_command(commands, "forward", _forward, "reach a port in a node from this machine", *examples)
    _add_node(parser)
    parser.add_argument("port", type=int, metavar="PORT", help="port that a program in the node listens on")
    text = "port of this machine; 0: any free one (default: PORT)"
    parser.add_argument("local_port", type=int, nargs="?", metavar="LOCAL_PORT", help=text)


def _add_node(parser: Parser) -> None:
    add_hosts(parser)
    parser.set_defaults(include="", exclude="")  # of all nodes
    parser.add_argument("node", metavar="NODE", help="node, by its name in the hostfile")


def _exec(arguments: Arguments) -> int:
    """Run a command in a node's container, as the user of its ranks, in the folder that has data/ and runs/. The exit
    code is the command's. It reads your input, and has a terminal if you have one."""
    command = arguments.command_line[arguments.command_line[:1] == ["--"] :]
    if not command or command[0].startswith("-"):
        todo = "give options, NODE, --, COMMAND: tridock exec --hosts hostfile host-a -- nvidia-smi"
        raise RequestError(Problem("COMMAND", "comes last", command[0] if command else "none", todo))
    return _inside(arguments, *command)


def _ssh(arguments: Arguments) -> int:
    """Open a login shell in a node's container, as the user of its ranks. The nodes reach each other from there by ssh
    and by name."""
    return _inside(arguments, "bash", "--login")


def _forward(arguments: Arguments) -> int:
    """Forward a port of this machine to one in a node's container, such as TensorBoard's or a notebook's, until Ctrl-C.
    Only this machine reaches it."""
    local = arguments.port if arguments.local_port is None else arguments.local_port
    for name, port, least in (("PORT", arguments.port, 1), ("LOCAL_PORT", local, 0)):
        if not least <= port < 1 << 16:
            raise RequestError(Problem(name, "is no port", str(port), f"give a number from {least} to 65535"))
    client = _client(arguments)
    from tridock.ops.hosts.forward import forward

    def ready(address: str) -> None:
        say(f"http://{address} leads to port {arguments.port} of {arguments.node}; Ctrl-C ends it")

    with suppress(KeyboardInterrupt):  # the normal end
        forward(client, arguments.node, arguments.port, local, ready)
    return 0


def _client(arguments: Arguments) -> NodeClient:
    hosts = arguments.open_hosts()
    from tridock.ops.hosts.client import NodeClient

    if arguments.node not in hosts.cluster.everywhere:
        todo = f"use one of {', '.join(hosts.cluster.everywhere)}"
        raise RequestError(Problem("NODE", "is not a node of this cluster", arguments.node, todo))
    client = NodeClient.of(hosts.only([arguments.node]))
    client.running()
    return client


def _inside(arguments: Arguments, *command: str) -> int:
    client = _client(arguments)
    host = client.hosts[arguments.node]
    if sys.stdin.isatty() and sys.stdout.isatty():
        return host.at_terminal(client.inside(arguments.node, *command, interactive=True, terminal=True))
    mark = f"{environment.EXEC}={secrets.token_hex(8)}"
    try:
        inside = client.inside(arguments.node, "env", mark, *command, interactive=True)
        done = host.read_into(_print, inside, chunks=_input())
    except KeyboardInterrupt:  # neither ssh nor `docker exec` passes it on
        client.run_inside(arguments.node, "sh", "-c", _END, "sh", mark, timeout=_END_S)
        raise
    sys.stderr.buffer.write(done.stderr)
    return done.exit_code


def _input() -> Iterator[bytes]:
    """This command's input as it comes, except what nobody types."""
    while not sys.stdin.isatty() and (chunk := os.read(sys.stdin.fileno(), _CHUNK)):
        yield chunk


def _print(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()
