"""The mesh probe's messages: the head asks every node's responder over ssh, and ``mesh-probe`` prints the answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tridock.contracts.network import Network
from tridock.contracts.node_answers import SshAnswer


@dataclass(frozen=True, slots=True)
class Hello:
    """The first line of a responder."""

    environment: Mapping[str, str]
    network: Network
    port: int
    """The port where it listens for the other nodes."""
    folder: str
    """Identity of the folder for runs, equal on the nodes that share it; empty if it cannot be written."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node: its address, and where its responder listens."""

    address: str
    port: int
    listens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeshRequest:
    """The head's request to a responder: probe these peers, or report the time if the list is empty."""

    peers: Mapping[str, Peer] | None = None


@dataclass(frozen=True, slots=True)
class Time:
    """The responder's clock, in seconds since the epoch."""

    time: float


@dataclass(frozen=True, slots=True)
class Route:
    """The address of a name, the source address and interface of the route to it; or the error."""

    target: str = ""
    source: str = ""
    interface: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Unreached:
    """An address of a peer that does not answer."""

    node: str
    address: str
    error: str


@dataclass(frozen=True, slots=True)
class PeerProbe:
    """A responder's findings about its peers."""

    unreached: tuple[Unreached, ...] = ()
    routes: Mapping[str, Route] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clock:
    """A node's clock offset from the head's, and its error bound, in seconds."""

    offset: float
    error: float


@dataclass(frozen=True, slots=True)
class MeshAnswer:
    """``mesh-probe``: the result for one node; ``hello``, ``clock`` and ``peers`` only if its responder answered."""

    ssh: SshAnswer
    hello: Hello | None = None
    clock: Clock | None = None
    peers: PeerProbe | None = None
