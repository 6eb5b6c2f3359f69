"""Network interfaces of this node, and those that Gloo and NCCL select by their own rules."""

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final

from tridock.contracts.network import ChosenInterface, Interface, Network

LOOPBACK: Final = "127.0.0.1"
_TIMEOUT_S: Final = 5.0


def interfaces() -> tuple[Interface, ...]:
    """Returns this node's interfaces that are up and have an address; none if ``ip`` is missing or fails."""
    argv = ["ip", "-json", "address", "show", "up"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(argv, capture_output=True, check=True, timeout=_TIMEOUT_S)
        return parse(json.loads(done.stdout))
    return ()


def parse(links: Sequence[Mapping[str, Any]]) -> tuple[Interface, ...]:
    """Parses the list that ``ip -json address`` prints, without link-local IPv6 addresses, which need a scope."""
    found = []
    for link in links:
        given = [info for info in link.get("addr_info", []) if "local" in info and info.get("scope") != "link"]
        addresses = [info["local"] for family in ("inet", "inet6") for info in given if info["family"] == family]
        if addresses:
            found.append(Interface(link["ifname"], int(link["mtu"]), tuple(addresses)))
    return tuple(found)


def network() -> Network:
    """Returns this node's interfaces, and those that Gloo and NCCL would use."""
    found = interfaces()
    gloo, address = gloo_choice(found, os.environ.get("GLOO_SOCKET_IFNAME"), own_addresses())
    nccl = nccl_choice(found, os.environ.get("NCCL_SOCKET_IFNAME"))
    chosen = {"gloo": _chosen(gloo, address), "nccl": _chosen(nccl, nccl.addresses[0] if nccl else "")}
    return Network(found, chosen, {name: os.environ.get(f"{name.upper()}_SOCKET_IFNAME") for name in chosen})


def _chosen(interface: Interface | None, address: str) -> ChosenInterface | None:
    return None if interface is None else ChosenInterface(interface.name, interface.mtu, address)


def holder(found: Sequence[Interface], address: str) -> Interface | None:
    """Returns the interface that has an address; all of 127.0.0.0/8 belongs to the loopback."""
    if ip_address(address).is_loopback:
        return next((it for it in found if it.name == "lo"), Interface("lo", 65536, (address,)))
    return next((it for it in found if address in it.addresses), None)


def nccl_choice(found: Sequence[Interface], wanted: str | None) -> Interface | None:
    """Selects like NCCL's ``findInterfaces``: the first match of ``NCCL_SOCKET_IFNAME``, or by NCCL's preferences."""
    # The system lists all IPv4 addresses before the first IPv6 one.
    ordered = sorted(found, key=lambda it: ip_address(it.addresses[0]).version)
    if wanted is not None and len(wanted) > 1:
        return next((it for it in ordered if _matches(it.name, wanted)), None)
    for pattern in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        for it in ordered:
            if _matches(it.name, pattern):
                return it
    return None


def _matches(name: str, pattern: str) -> bool:
    """Matches by NCCL's syntax: a list of prefixes; a leading ``^`` excludes them, ``=`` matches whole names."""
    others = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    names = [part for part in pattern.removeprefix("=").split(",") if part]
    hit = name in names if exact else any(name.startswith(part) for part in names)
    return hit != others


def gloo_choice(found: Sequence[Interface], wanted: str | None, own: Sequence[str]) -> tuple[Interface | None, str]:
    """Selects like torch for Gloo: the first of ``GLOO_SOCKET_IFNAME``, else the one with the host name's address.

    ``own`` holds the addresses of the host name that a socket can bind. The second value is the address.
    """
    if wanted:
        name = wanted.split(",")[0].strip()
        named = next((it for it in found if it.name == name), None)
        return named, named.addresses[0] if named else ""
    address = own[0] if own else LOOPBACK
    return holder(found, address), address


def own_addresses() -> list[str]:
    """Returns the addresses of this node's host name that a socket here can bind."""
    usable = []
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(target)
                usable.append(str(target[0]))
    return usable


def route_to(address: str) -> tuple[str, str]:
    """Returns the address that a name resolves to, and the source address of its route. Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(target)
        return str(target[0]), str(probe.getsockname()[0])
