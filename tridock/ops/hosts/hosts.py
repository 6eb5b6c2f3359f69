"""The hosts of a cluster: one connection each, and an action on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.remote import Host, Outcome, connect, on_all, raise_failures

T = TypeVar("T")


class Hosts(Mapping[str, Host]):
    """Hosts of one cluster by node name: all of them, or some, in the hostfile's order. The head comes first."""

    def __init__(self, cluster: Cluster, hosts: Mapping[str, Host] | None = None, *, quiet: bool = False) -> None:
        """``quiet``: long work on them shows no progress. Contacts no host."""
        self.cluster: Final = cluster
        self.transport: Final = transport_of(cluster)
        self.quiet: Final = quiet
        self.silent: Final = set[str]()
        """Hosts of the hostfile that are not among these, and did not answer."""
        self._hosts: Final = connect(cluster) if hosts is None else hosts

    def __getitem__(self, node: str) -> Host:
        return self._hosts[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self)

    @property
    def head(self) -> str:
        """The first node: launchers run there."""
        return self.nodes[0]

    def only(self, nodes: Iterable[str]) -> Hosts:
        """Returns those of ``nodes``, over the same connections."""
        chosen = set(nodes)
        return Hosts(self.cluster, {it: host for it, host in self.items() if it in chosen}, quiet=self.quiet)

    def within(self, cluster: Cluster) -> Hosts:
        """Returns those of ``cluster``, which is this one with fewer slots, in its order, over the same connections."""
        hosts = Hosts(cluster, {node: self[node] for node in cluster.everywhere}, quiet=self.quiet)
        hosts.silent.update(self.silent)
        return hosts

    def each(self, action: Callable[[str, Host], T], only: Iterable[str] | None = None) -> dict[str, T]:
        """Runs an action on every host at once, under the cluster's cap; all failures in one error."""
        return raise_failures(self.try_each(action, only))

    def try_each(self, action: Callable[[str, Host], T], only: Iterable[str] | None = None) -> dict[str, Outcome[T]]:
        """As :meth:`each`, with a host's error in place of its value."""
        hosts = self if only is None else self.only(only)
        return on_all(hosts, action, self.cluster.settings.ssh.max_connections)
