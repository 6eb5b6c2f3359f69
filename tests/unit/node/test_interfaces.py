"""Which interface Gloo and NCCL would use, by their own rules."""

from __future__ import annotations

import pytest

from tridock.contracts.network import ChosenInterface
from tridock.node.probes import interfaces as net
from tridock.node.probes.interfaces import Interface

LO = Interface("lo", 65536, ("127.0.0.1", "::1"))
DOCKER = Interface("docker0", 1500, ("203.0.113.1",))
ETH = Interface("eno1", 1500, ("192.0.2.1", "2001:db8::1"))
IB = Interface("ib0", 4092, ("198.51.100.1",))
ONLY6 = Interface("eth6", 1500, ("2001:db8::2",))

LINKS = [
    {
        "ifname": "lo", "mtu": 65536,
        "addr_info": [
            {"family": "inet", "local": "127.0.0.1", "scope": "host"},
            {"family": "inet6", "local": "::1", "scope": "host"},
        ],
    },
    {
        "ifname": "eno1", "mtu": 9000,
        "addr_info": [
            {"family": "inet6", "local": "fe80::1", "scope": "link"},
            {"family": "inet6", "local": "2001:db8::1", "scope": "global"},
            {"family": "inet", "local": "192.0.2.1", "scope": "global"},
        ],
    },
    {"ifname": "eno2", "mtu": 1500, "addr_info": [{"family": "inet6", "local": "fe80::2", "scope": "link"}]},
    {"ifname": "eno3", "mtu": 1500, "addr_info": [{}]},
]  # fmt: skip


def test_what_ip_prints_is_read() -> None:
    assert net.parse(LINKS) == (LO, Interface("eno1", 9000, ("192.0.2.1", "2001:db8::1")))


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, IB),
        ("", IB),
        ("eno1", ETH),
        ("e", IB),  # a single letter counts as nothing to NCCL
        ("en,docker", DOCKER),  # whichever the system lists first
        ("^ib,docker,lo", ETH),
        ("=eno1", ETH),
        ("=eno", None),
        ("wlan", None),
    ],
)
def test_nccls_choice(wanted: str | None, chosen: Interface | None) -> None:
    assert net.nccl_choice((LO, DOCKER, ETH, IB), wanted) == chosen


def test_nccls_order_of_taste() -> None:
    assert net.nccl_choice((LO, DOCKER, ETH), None) == ETH
    assert net.nccl_choice((LO, DOCKER), None) == DOCKER
    assert net.nccl_choice((LO,), None) == LO
    assert net.nccl_choice((), None) is None
    assert net.nccl_choice((LO, ONLY6, ETH), None) == ETH


def test_gloos_choice() -> None:
    found = (LO, DOCKER, ETH, IB)
    assert net.gloo_choice(found, "eno1,ib0", []) == (ETH, "192.0.2.1")
    assert net.gloo_choice(found, "eno", []) == (None, "")
    assert net.gloo_choice(found, None, ["192.0.2.1"]) == (ETH, "192.0.2.1")
    # Debian's line for a host's own name, and a name that leads nowhere.
    assert net.gloo_choice(found, None, ["127.0.1.1"]) == (LO, "127.0.1.1")
    assert net.gloo_choice(found, None, []) == (LO, "127.0.0.1")


def test_this_machine_has_interfaces_and_a_way_to_itself() -> None:
    found = net.interfaces()
    assert "lo" in [it.name for it in found]
    target, source = net.route_to("localhost")
    assert net.holder(found, source) == next(it for it in found if it.name == "lo")
    assert target in ("127.0.0.1", "::1")
    assert all(net.holder(found, address) for address in net.own_addresses())
    with pytest.raises(OSError, match=r"Name or service not known|name resolution"):
        net.route_to("no-such-host.invalid")


def test_an_address_that_nobody_has() -> None:
    assert net.holder((LO, ETH), "203.0.113.9") is None
    assert net.holder((), "127.0.1.1") == Interface("lo", 65536, ("127.0.1.1",))


def test_the_interfaces_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "interfaces", lambda: (LO, DOCKER, ETH))
    monkeypatch.setattr(net, "own_addresses", lambda: ["127.0.1.1"])  # Debian's line for a host's own name
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "docker")
    found = net.network()
    assert found.interfaces == (LO, DOCKER, ETH)
    assert found.wanted == {"gloo": None, "nccl": "docker"}
    assert found.chosen == {
        "gloo": ChosenInterface("lo", 65536, "127.0.1.1"),
        "nccl": ChosenInterface("docker0", 1500, "203.0.113.1"),
    }
