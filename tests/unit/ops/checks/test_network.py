"""Interfaces, routes and packets: what is said of them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.checks.lab import make_cluster, shown
from tridock.cluster.settings import Cluster
from tridock.contracts.codec import decode
from tridock.contracts.mesh_answers import MeshAnswer
from tridock.contracts.network import ChosenInterface, Interface, Network
from tridock.contracts.node_answers import QuickReport
from tridock.ops.checks.network import interface_findings, network_findings


def node(number: int) -> dict[str, Any]:
    """A node that is on one network with the others."""
    own = f"192.0.2.{number}"
    lo = {"name": "lo", "mtu": 65536, "addresses": ["127.0.0.1"]}
    eth0 = {"name": "eth0", "mtu": 1500, "addresses": [own]}
    choice = {"name": "eth0", "mtu": 1500, "address": own}
    network = {
        "interfaces": [lo, eth0],
        "chosen": {"gloo": choice, "nccl": choice},
        "wanted": {"gloo": None, "nccl": None},
    }
    others = {1, 2, 3} - {number}
    routes = {f"host-{it}": {"target": f"192.0.2.{it}", "source": own, "interface": "eth0"} for it in others}
    hello = {"environment": {}, "network": network, "port": 1, "folder": ""}
    return copy.deepcopy(
        {"ssh": {"exit": 0, "out": "", "err": ""}, "hello": hello, "peers": {"routes": routes, "unreached": []}}
    )


def found(cluster: Cluster, mesh: dict[str, Any], on_gpus: bool = False) -> list[str]:
    """The findings from an answer as the head prints it."""
    return shown(network_findings(cluster, decode(dict[str, MeshAnswer], json.dumps(mesh)), on_gpus))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path, hosts=3)


@pytest.fixture
def mesh() -> dict[str, Any]:
    return {f"host-{number}": node(number) for number in (1, 2, 3)}


def test_nodes_on_one_network(cluster: Cluster, mesh: dict[str, Any]) -> None:
    assert found(cluster, mesh, on_gpus=True) == []


def test_debians_line_for_the_host_name(cluster: Cluster, mesh: dict[str, Any]) -> None:
    """And that the others call themselves there is not said as well."""
    mesh["host-2"]["hello"]["network"]["chosen"]["gloo"] = {"name": "lo", "mtu": 65536, "address": "127.0.1.1"}
    mesh["host-3"]["peers"]["unreached"] = [{"node": "host-2", "address": "127.0.1.1", "error": "connection refused"}]
    assert found(cluster, mesh, on_gpus=False) == [
        "fail  host-2: Gloo would use an interface of its own; got lo, 127.0.1.1 (its host name leads there); "
        "set GLOO_SOCKET_IFNAME: eth0 for it (nodes.host-2.env in the settings), then tridock up"
    ]


def test_nccl_on_dockers_bridge_matters_to_gpus(cluster: Cluster, mesh: dict[str, Any]) -> None:
    network = mesh["host-2"]["hello"]["network"]
    network["chosen"]["nccl"] = {"name": "docker0", "mtu": 1500, "address": "203.0.113.1"}
    network["wanted"]["nccl"] = "docker"
    assert found(cluster, mesh, on_gpus=False) == []
    assert found(cluster, mesh, on_gpus=True) == [
        "fail  host-2: NCCL would use an interface of its own; "
        "got docker0, 203.0.113.1 (NCCL_SOCKET_IFNAME says so); "
        "set NCCL_SOCKET_IFNAME: eth0 for it (nodes.host-2.env in the settings), then tridock up"
    ]


def test_a_name_that_no_interface_has(cluster: Cluster, mesh: dict[str, Any]) -> None:
    network = mesh["host-2"]["hello"]["network"]
    network["chosen"]["gloo"], network["wanted"]["gloo"] = None, "ib0"
    assert found(cluster, mesh, on_gpus=False) == [
        "fail  host-2: GLOO_SOCKET_IFNAME names no interface that it has; got ib0; "
        "correct it (env in the settings), or leave it out, then tridock up; it has eth0"
    ]


def test_a_container_without_a_network(cluster: Cluster, mesh: dict[str, Any]) -> None:
    network = mesh["host-2"]["hello"]["network"]
    network |= {"chosen": {"gloo": None, "nccl": None}, "interfaces": []}
    assert found(cluster, mesh, on_gpus=False) == [
        "fail  host-2: has no network interface that is up; see container.network in the settings, then tridock up"
    ]


def test_a_firewall_before_one_node_and_between_two(cluster: Cluster, mesh: dict[str, Any]) -> None:
    todo = (
        "let the nodes through to each other on all ports (firewall), or name a network that they share in env "
        "(GLOO_, NCCL_SOCKET_IFNAME)"
    )
    mesh["host-1"]["peers"]["unreached"] = [{"node": "host-2", "address": "192.0.2.2", "error": "no answer within 3 s"}]
    assert found(cluster, mesh, on_gpus=False) == [
        f"fail  host-2: is not reached by host-1 at 192.0.2.2; got no answer within 3 s; {todo}"
    ]
    mesh["host-3"]["peers"]["unreached"] = [{"node": "host-2", "address": "192.0.2.2", "error": "no answer within 3 s"}]
    assert found(cluster, mesh, on_gpus=False) == [
        f"fail  host-2: is not reached by any other node at 192.0.2.2; got no answer within 3 s; {todo}"
    ]


def test_a_head_that_is_not_found_or_taken_for_oneself(cluster: Cluster, mesh: dict[str, Any]) -> None:
    mesh["host-2"]["peers"]["routes"]["host-1"] = {"error": "Name or service not known"}
    lost = {"target": "127.0.1.1", "source": "127.0.0.1", "interface": "lo"}
    mesh["host-3"]["peers"]["routes"]["host-1"] = lost
    assert found(cluster, mesh, on_gpus=False) == [
        "fail  host-2: does not find the head at host-1; got name or service not known; "
        "give its address (nodes.host-1.address)",
        "fail  host-3: resolves the head's name to itself at host-1; got 127.0.1.1 through lo; "
        "give its address (nodes.host-1.address)",
    ]


def test_packets_of_another_size(cluster: Cluster, mesh: dict[str, Any]) -> None:
    mesh["host-3"]["hello"]["network"]["chosen"]["gloo"]["mtu"] = 9000
    assert found(cluster, mesh, on_gpus=False) == [
        "warn  host-3: its MTU differs from the head's; "
        "got 9000 on eth0, 1500 on eth0 of host-1; "
        "give both interfaces the same (ip link set mtu), the switch between them included"
    ]


def test_one_node_alone_needs_no_network(cluster: Cluster, mesh: dict[str, Any]) -> None:
    mesh["host-1"]["hello"]["network"]["chosen"]["gloo"] = {"name": "lo", "mtu": 65536, "address": "127.0.0.1"}
    assert found(cluster, {"host-1": mesh["host-1"]}, on_gpus=False) == []


def test_what_a_node_knows_itself_is_said_before_a_launch(cluster: Cluster) -> None:
    chosen = {
        "gloo": ChosenInterface("lo", 65536, "127.0.1.1"),
        "nccl": ChosenInterface("docker0", 1500, "203.0.113.1"),
    }
    network = Network((Interface("eth0", 1500, ("192.0.2.2",)),), chosen, {"gloo": None, "nccl": None})
    common: dict[str, Any] = {"protocol": 1, "shm": None, "disk": None, "unwritable": None, "cuda_error": None}
    report = QuickReport(**common, built_for="cpu", network=network)
    (found,) = interface_findings(cluster, "host-2", report)
    assert str(found.problem) == (
        "host-2: Gloo would use an interface of its own; got lo, 127.0.1.1 (its host name leads there); "
        "set GLOO_SOCKET_IFNAME: eth0 for it (nodes.host-2.env in the settings), then tridock up"
    )
    assert len(list(interface_findings(cluster, "host-2", replace(report, built_for="cuda")))) == 2
    without_ip = replace(report, network=replace(network, interfaces=()))
    assert list(interface_findings(cluster, "host-2", without_ip)) == []
