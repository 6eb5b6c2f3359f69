"""Free ports, and who holds a taken one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.unit.node.conftest import answer, node
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import PortAnswer, PreflightAnswer
from tridock.contracts.supervision import contract
from tridock.errors import Problem
from tridock.node.probes import ports


def test_a_free_port_is_one_that_can_be_taken() -> None:
    head = answer("preflight", "--head")
    assert head["contract"] == contract()
    port = head["rendezvous"]["port"]
    assert port in range(20000, 30000)
    with socket.create_server(("", port)):
        pass
    assert answer("preflight", "--head", "--port", str(port))["rendezvous"] == {"port": port, "problem": None}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_taken_port_names_its_holder(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        found = decode(PreflightAnswer, node("preflight", "--head", "--port", str(port)).stdout).rendezvous
        comm = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
        problem = Problem(f"port {port}", "is taken", f"{comm} (pid {os.getpid()})", "use another")
        assert found == PortAnswer(None, problem)


def test_a_port_of_a_connection_that_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)
    assert ports.is_free(port)


def test_a_holder_that_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "holder", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = ports.rendezvous_port(port)
    assert str(found.problem) == f"port {port}: is taken; got a process that cannot be seen from here; use another"


def test_no_port_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda _: False)
    assert str(ports.rendezvous_port().problem) == (
        "ports: none of 200 tried from 20000 to 29999 is free; give launch.master_port, or end what listens there"
    )
