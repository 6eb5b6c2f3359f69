"""The hosts of one operation: a host that fails drops out, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tridock.errors import TridockError
from tridock.ops.hosts.facts import HostState
from tridock.ops.hosts.session import Session
from tridock.remote import Host, Outcome, on_all, raise_failures

T = TypeVar("T")


class Crew:
    """Hosts by node name; ``workspaces`` has those that said where theirs is."""

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
        """All of them, the failed ones too, in the hostfile's order."""
        return tuple(self._outcomes)

    def host(self, node: str) -> Host:
        """The host of a node."""
        return self._hosts[node]

    def fit(self, node: str) -> bool:
        """Whether nothing has gone wrong there yet."""
        return node in self._outcomes and self._outcomes[node].ok

    def each(self, action: Callable[[str, Host], T], only: tuple[str, ...] | None = None) -> dict[str, T]:
        """Runs an action on the hosts that are fit, at once and under the cap; the values of those that stay so."""
        hosts = {node: self._hosts[node] for node in self.nodes if self.fit(node) and (only is None or node in only)}
        outcomes = on_all(hosts, action, cap=self.cluster.settings.ssh.max_connections)
        for node, outcome in outcomes.items():
            if outcome.error is not None:
                self._outcomes[node] = outcome
        return {node: outcome.value for node, outcome in outcomes.items() if outcome.ok}  # type: ignore[misc]

    def failure(self) -> TridockError | None:
        """All that went wrong, in one error; what is no failure of a host's is raised here."""
        try:
            raise_failures(self._outcomes)
        except TridockError as failure:
            return failure
        return None
