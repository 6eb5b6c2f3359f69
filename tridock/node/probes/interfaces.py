"""Network interfaces of this node, and which of them Gloo and NCCL would use: their own rules, done over."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

LOOPBACK: Final = "127.0.0.1"
_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface that is up, its addresses in the order of the system's, IPv4 first."""

    name: str
    mtu: int
    addresses: tuple[str, ...]


def interfaces() -> tuple[Interface, ...]:
    """Those of this node that are up and have an address."""
    words = ["ip", "-json", "address", "show", "up"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(words, capture_output=True, check=True, timeout=_TIMEOUT_S)
        return parse(json.loads(done.stdout))
    return ()


def parse(links: Sequence[Mapping[str, Any]]) -> tuple[Interface, ...]:
    """Reads the list that ``ip -json address`` prints; link-local IPv6 addresses reach nobody by themselves."""
    found = []
    for link in links:
        given = [info for info in link.get("addr_info", []) if "local" in info and info.get("scope") != "link"]
        addresses = [info["local"] for family in ("inet", "inet6") for info in given if info["family"] == family]
        if addresses:
            found.append(Interface(link["ifname"], int(link["mtu"]), tuple(addresses)))
    return tuple(found)


def holder(found: Sequence[Interface], address: str) -> Interface | None:
    """The interface that has an address; the whole of 127.0.0.0/8 is the loopback's."""
    if ip_address(address).is_loopback:
        return next((it for it in found if it.name == "lo"), Interface("lo", 65536, (address,)))
    return next((it for it in found if address in it.addresses), None)


def nccl_choice(found: Sequence[Interface], wanted: str | None) -> Interface | None:
    """As NCCL's ``findInterfaces``: the first that ``NCCL_SOCKET_IFNAME`` leaves, or by its own order of taste."""
    ordered = _by_family(found)
    if wanted is not None and len(wanted) > 1:
        return next((it for it in ordered if _matches(it.name, wanted)), None)
    for pattern in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        for it in ordered:
            if _matches(it.name, pattern):
                return it
    return None


def _by_family(found: Sequence[Interface]) -> list[Interface]:
    # The system lists all IPv4 addresses before the first IPv6 one.
    return sorted(found, key=lambda it: ip_address(it.addresses[0]).version)


def _matches(name: str, pattern: str) -> bool:
    """NCCL's grammar: a list of prefixes, ``^`` before it for all others, ``=`` for whole names."""
    others = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    exact = pattern.startswith("=")
    words = [word for word in pattern.removeprefix("=").split(",") if word]
    hit = name in words if exact else any(name.startswith(word) for word in words)
    return hit != others


def gloo_choice(found: Sequence[Interface], wanted: str | None, own: Sequence[str]) -> tuple[Interface | None, str]:
    """As torch makes Gloo's device: ``GLOO_SOCKET_IFNAME``'s first, else where this node's own name leads.

    ``own`` are the addresses of the host name that one can listen on. The second value is the address.
    """
    if wanted:
        name = wanted.split(",")[0].strip()
        named = next((it for it in found if it.name == name), None)
        return named, named.addresses[0] if named else ""
    address = own[0] if own else LOOPBACK
    return holder(found, address), address


def own_addresses() -> list[str]:
    """Where this node's host name leads, of this node's own addresses."""
    usable = []
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(target)
                usable.append(str(target[0]))
    return usable


def route_to(address: str) -> tuple[str, str]:
    """An address that a name leads to, and the own one from which it is reached; raises OSError with the reason."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(target)
        return str(target[0]), str(probe.getsockname()[0])
