"""A node's network interfaces, and those that Gloo and NCCL choose."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up; its addresses in the system's order, IPv4 first."""

    name: str
    mtu: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChosenInterface:
    """The interface and address that a library uses."""

    name: str
    mtu: int
    address: str


@dataclass(frozen=True, slots=True)
class Network:
    """A node's interfaces; for ``gloo`` and ``nccl`` the chosen interface and the value of its variable."""

    interfaces: tuple[Interface, ...]
    chosen: Mapping[str, ChosenInterface | None]
    wanted: Mapping[str, str | None]
