"""Connects from the head to every node, itself included, over ssh as pdsh connections it, all nodes at once."""

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

_TIMEOUT_S: Final = 12.0
_ROUNDS: Final = 3


def greet_nodes(nodes: list[str]) -> dict[str, dict[str, Any]]:
    """The answer of each node's sshd: ``exit`` (None after a timeout), ``out``, ``err``."""

    def greet(node: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*cluster_ssh.PROBE, node, mesh_responder.greeting()],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return {"exit": None, "out": _text(error.stdout), "err": _text(error.stderr)}
        return {"exit": done.returncode, "out": _text(done.stdout), "err": _text(done.stderr)}

    return _concurrently(nodes, greet)


def probe_mesh(addresses: Mapping[str, str], token: str) -> dict[str, dict[str, Any]]:
    """Connects to every node, and lets those that answer probe each other: clocks, interfaces, routes, shared folders.

    ``addresses`` holds the address at which the others reach each node. A node that answers also has ``hello`` and
    ``look`` (see :mod:`tridock.node.probes.mesh_responder`) and ``clock``: its time minus ours, and the error bound of
    that, in seconds.
    """
    connections = {node: _Connection(node, token) for node in addresses}
    try:
        answers = _concurrently(list(connections), lambda node: connections[node].greet())
        hellos = {node: answer["hello"] for node, answer in answers.items() if "hello" in answer}
        peers = {
            node: {"address": addresses[node], "port": hello["port"], "listens": _addresses(hello["network"])}
            for node, hello in hellos.items()
        }
        looks = _concurrently(
            list(hellos), lambda node: connections[node].probe({at: peers[at] for at in peers if at != node})
        )
        return {node: answers[node] | looks.get(node, {}) for node in addresses}
    finally:
        _concurrently(list(connections), lambda node: connections[node].close())


def _addresses(network: Mapping[str, Any]) -> list[str]:
    chosen = [network[library]["address"] for library in ("gloo", "nccl") if network[library]]
    return list(dict.fromkeys(chosen))


def _concurrently(nodes: list[str], action: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    if not nodes:
        return {}
    with ThreadPoolExecutor(len(nodes)) as pool:
        return dict(zip(nodes, pool.map(action, nodes), strict=True))


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")


class _Connection:
    """One ssh connection to a node; a step that exceeds its timeout kills the connection."""

    def __init__(self, node: str, token: str) -> None:
        # A file and not a pipe, which would have to be read meanwhile however much the server prints.
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

    def greet(self) -> dict[str, Any]:
        """The greeting; of a node also the first line of its responder, and its clock."""
        with self._timeout():
            answer: dict[str, Any] = {"out": self._line()}
            try:
                answer |= {"exit": 0, "hello": json.loads(self._line()), "clock": self._clock()}
            except (ValueError, KeyError, OSError):
                answer["exit"] = self._end()
        self._errors.seek(0)
        return answer | {"err": _text(self._errors.read())}

    def probe(self, peers: Mapping[str, object]) -> dict[str, Any]:
        """What this node finds out about the others."""
        with self._timeout(), suppress(ValueError, OSError):
            return {"look": self._ask({"peers": peers})}
        return {}

    def _clock(self) -> dict[str, float]:
        """The fastest of several requests; the far clock was read half a round trip after the request, as in NTP."""
        samples = []
        for _ in range(_ROUNDS):
            sent = time.time()
            remote = self._ask({})["time"]
            received = time.time()
            samples.append((received - sent, remote - (sent + received) / 2))
        round_trip, offset = min(samples)
        return {"offset": offset, "error": round_trip / 2}

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
        """The exit code; None if it was killed."""
        with suppress(OSError):
            self._close_input()
        code = self._process.wait()
        return code if code >= 0 else None

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> dict[str, Any]:
        """Ends the responder and the connection."""
        with self._timeout():
            code = self._end()
        self._errors.close()
        return {"exit": code}
