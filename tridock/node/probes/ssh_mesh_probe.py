"""The way that a launch takes, from the head to every node, itself too: ssh as pdsh calls it, all nodes at once."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import Any, Final

from tridock.contracts import cluster_ssh
from tridock.node.probes import mesh_responder

_LIMIT_S: Final = 12.0
_ROUNDS: Final = 3


def greet(nodes: list[str]) -> dict[str, dict[str, Any]]:
    """What each node's sshd said: exit code, output, errors."""

    def one(node: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*cluster_ssh.PROBE, node, mesh_responder.greeting()],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return {"exit": None, "out": _text(error.stdout), "err": _text(error.stderr)}
        return {"exit": done.returncode, "out": _text(done.stdout), "err": _text(done.stderr)}

    return _at_once(nodes, one)


def meet(addresses: Mapping[str, str], token: str) -> dict[str, dict[str, Any]]:
    """Greets every node, and lets those that answer look at each other: clocks, interfaces, routes, shared folders.

    ``addresses`` is where each node is reached by the others. A node that answers also has ``hello`` and ``look``
    (see :mod:`tridock.node.probes.mesh_responder`) and ``clock``: its time less ours, and its uncertainty, in seconds.
    """
    calls = {node: _Call(node, token) for node in addresses}
    try:
        answers = _at_once(list(calls), lambda node: calls[node].greet())
        there = {node: said["hello"] for node, said in answers.items() if "hello" in said}
        peers = {
            node: {"address": addresses[node], "port": hello["port"], "listens": _listens(hello["network"])}
            for node, hello in there.items()
        }
        looks = _at_once(list(there), lambda node: calls[node].look({at: peers[at] for at in peers if at != node}))
        return {node: answers[node] | looks.get(node, {}) for node in addresses}
    finally:
        _at_once(list(calls), lambda node: calls[node].close())


def _listens(network: Mapping[str, Any]) -> list[str]:
    chosen = [network[library]["address"] for library in ("gloo", "nccl") if network[library]]
    return list(dict.fromkeys(chosen))


def _at_once(nodes: list[str], action: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    if not nodes:
        return {}
    with ThreadPoolExecutor(len(nodes)) as pool:
        return dict(zip(nodes, pool.map(action, nodes), strict=True))


def _text(words: bytes | None) -> str:
    return (words or b"").decode(errors="replace")


class _Call:
    """One ssh connection to a node; each step that takes too long is ended by force, and the connection with it."""

    def __init__(self, node: str, token: str) -> None:
        # Files, not pipes: whatever much a server says, nobody has to read it meanwhile.
        self._errors = TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [*cluster_ssh.PROBE, node, mesh_responder.command(token)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        timer = threading.Timer(_LIMIT_S, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def greet(self) -> dict[str, Any]:
        """The greeting, and where it is a node's the first words of the program there and its clock."""
        with self._in_time():
            mesh_responder: dict[str, Any] = {"out": self._line()}
            try:
                mesh_responder |= {"exit": 0, "hello": json.loads(self._line()), "clock": self._clock()}
            except (ValueError, KeyError, OSError):
                mesh_responder["exit"] = self._end()
        self._errors.seek(0)
        return mesh_responder | {"err": _text(self._errors.read())}

    def look(self, peers: Mapping[str, object]) -> dict[str, Any]:
        """What this node sees of the others."""
        with self._in_time(), suppress(ValueError, OSError):
            return {"look": self._ask({"peers": peers})}
        return {}

    def _clock(self) -> dict[str, float]:
        """The quickest of some questions: half of the way there and back is when the far clock was read."""
        found = []
        for _ in range(_ROUNDS):
            asked = time.time()
            far = self._ask({})["time"]
            back = time.time()
            found.append((back - asked, far - (asked + back) / 2))
        trip, offset = min(found)
        return {"offset": offset, "error": trip / 2}

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        return _text(self._process.stdout.readline())

    def _end(self) -> int | None:
        """The exit code; None where it had to be ended."""
        with suppress(OSError):
            self._close_input()
        code = self._process.wait()
        return code if code >= 0 else None

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> dict[str, Any]:
        """Lets the far side go, and goes."""
        with self._in_time():
            code = self._end()
        self._errors.close()
        return {"exit": code}
