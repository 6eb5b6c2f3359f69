"""The hosts of one operation, and which of them share a folder: a file is sent once per shared folder."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tridock.errors import TridockError
from tridock.ops.hosts.facts import HostState
from tridock.ops.hosts.session import Session
from tridock.ops.sync.transfer import probe_command, seen_command, unprobe_command
from tridock.remote import Host, Outcome, on_all, raise_failures

T = TypeVar("T")


class HostPool:
    """Hosts by node name; ``workspaces`` holds those of the hosts that answered."""

    def __init__(self, session: Session, only: tuple[str, ...] | None = None) -> None:
        self.cluster = session.cluster
        self._outcomes: dict[str, Outcome[Any]] = {
            node: Outcome() for node in session.nodes if only is None or node in only
        }
        self._hosts = session.hosts
        self.states: dict[str, HostState] = self.each(session.read_state)
        self.transport = session.transport
        self.workspaces = {node: self.transport.workspace(state.facts) for node, state in self.states.items()}

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, failed ones included, in hostfile order."""
        return tuple(self._outcomes)

    def host(self, node: str) -> Host:
        """Returns the host of a node."""
        return self._hosts[node]

    def fit(self, node: str) -> bool:
        """Whether no action has failed on the host yet."""
        return node in self._outcomes and self._outcomes[node].ok

    def each(self, action: Callable[[str, Host], T], only: tuple[str, ...] | None = None) -> dict[str, T]:
        """Runs an action on the healthy hosts in parallel, under the cap; returns the values of those that succeed."""
        hosts = {node: self._hosts[node] for node in self.nodes if self.fit(node) and (only is None or node in only)}
        outcomes = on_all(hosts, action, cap=self.cluster.settings.ssh.max_connections)
        for node, outcome in outcomes.items():
            if outcome.error is not None:
                self._outcomes[node] = outcome
        return {node: outcome.value for node, outcome in outcomes.items() if outcome.ok}  # type: ignore[misc]

    def failure(self) -> TridockError | None:
        """Combines all host errors into one; raises an error that is not a host's."""
        try:
            raise_failures(self._outcomes)
        except TridockError as failure:
            return failure
        return None


OPERATOR: Final = ""
"""The name that stands for the operator's own project folder among the nodes."""
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """For each node and folder, its keeper (the first node that sees it, or the operator) and its free bytes."""

    keepers: Mapping[tuple[str, str], str]
    free: Mapping[tuple[str, str], int]

    def keeper(self, node: str, place: str) -> str:
        """Returns the node that receives this folder's files for all that share it; OPERATOR for the project's own
        folder.
        """
        return self.keepers.get((node, place), node)


def find_shared(pool: HostPool, project: Path, places: tuple[str, ...], *, make: bool) -> Sharing:
    """Finds shared folders by probe files, which it removes. ``make`` creates missing folders on a host.

    It looks up random names rather than listings, which a network file system may serve from its cache.
    """
    token = secrets.token_hex(8)
    names = {node: f".tridock-probe-{token}-{number}" for number, node in enumerate((OPERATOR, *pool.nodes))}

    def put_probe(node: str, host: Host) -> None:
        command = probe_command(pool.workspaces[node], names[node], places, make=make)
        host.run(command, timeout=_TIMEOUT_S).checked(node)

    def find(node: str, host: Host) -> str:
        command = seen_command(pool.workspaces[node], tuple(names.values()), places)
        return host.run(command, timeout=_TIMEOUT_S).checked(node).stdout.decode(errors="surrogateescape")

    def remove_probe(node: str, host: Host) -> None:
        host.run(unprobe_command(pool.workspaces[node], names[node], places), timeout=_TIMEOUT_S)

    with _own_probes(project, places, names[OPERATOR]):
        probed = pool.each(put_probe)
        try:
            seen = {node: [line.split("\t") for line in text.split("\n")] for node, text in pool.each(find).items()}
            own = {
                (node, place)
                for node in seen
                for place in places
                # The operator may have read access only.
                if (project / place / names[node]).exists()
            }
        finally:
            pool.each(remove_probe, only=tuple(probed))
    nodes = {name: node for node, name in names.items()}
    sightings = {
        (node, parts[2], nodes[parts[1]]) for node, lines in seen.items() for parts in lines if parts[0] == "seen"
    }
    sightings |= {(node, place, OPERATOR) for node, place in own}
    free = {
        (node, parts[2]): int(parts[1]) * 1024 for node, lines in seen.items() for parts in lines if parts[0] == "free"
    }
    return Sharing(_keepers((OPERATOR, *seen), places, sightings), free)


def _keepers(
    who: tuple[str, ...], places: tuple[str, ...], sightings: set[tuple[str, str, str]]
) -> dict[tuple[str, str], str]:
    """Maps each node's folder to the first node that shares it; one-way visibility is enough."""
    keepers: dict[tuple[str, str], str] = {}
    for place in places:
        for number, node in enumerate(who):
            met = (it for it in who[:number] if {(node, place, it), (it, place, node)} & sightings)
            keepers[node, place] = next(met, node)
    return keepers


@contextmanager
def _own_probes(project: Path, places: tuple[str, ...], name: str) -> Iterator[None]:
    """Creates the operator's own probe files; skips a read-only folder, as the hosts' files suffice."""
    probes = [project / place / name for place in places]
    try:
        for probe in probes:
            with suppress(OSError):
                probe.touch()
        yield
    finally:
        for probe in probes:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
