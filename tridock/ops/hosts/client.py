"""Commands inside the nodes' containers, and the verbs of ``python -m tridock.node`` there."""

from __future__ import annotations

import sys
from typing import Final, TypeVar

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.codec import FormError, decode
from tridock.contracts.node_answers import USAGE
from tridock.errors import ClusterError, Problem, cut
from tridock.ops.hosts.facts import States, ask_states, read_states
from tridock.ops.hosts.hosts import Hosts
from tridock.progress import bars
from tridock.remote import Completed, connect, raise_failures

T = TypeVar("T")

_NOT_FOUND: Final = 127  # of docker exec, as of a shell
# -P: not the code of a folder that happens to be the current one.
NODE: Final = (run_folder.PYTHON, "-P", "-m", "tridock.node")


class NodeClient:
    """Runs commands in the nodes of ``hosts``, whose ``states`` say which user and folder a container has there."""

    def __init__(self, hosts: Hosts, states: States) -> None:
        self.hosts: Final = hosts
        self.states: Final = states
        self.cluster: Final = hosts.cluster

    @property
    def head(self) -> str:
        return self.hosts.head

    @classmethod
    def of(cls, hosts: Hosts) -> NodeClient:
        """Reads the hosts' states. Raises :class:`ClusterError` with those that do not answer."""
        return cls(hosts, read_states(hosts))

    def workspace(self, node: str) -> str:
        """The folder on the node's host that its container mounts as /workspace."""
        return self.hosts.transport.workspace(self.states[node].facts)

    def running(self) -> tuple[str, ...]:
        """The nodes that are running. Raises :class:`ClusterError` where there is none."""
        found = tuple(node for node, state in self.states.items() if state.container and state.container.running)
        if not found:
            todo = f"run tridock up {self.cluster.hosts_option}"
            raise ClusterError(Problem(node, "its node is not running", "", todo) for node in self.hosts)
        return found

    def inside(
        self, node: str, *argv: str, stdin: bytes | None = None, interactive: bool = False, terminal: bool = False
    ) -> Command:
        """A command of the node's container, as the argv that its host executes."""
        given = (node, self.states[node].facts, Command(argv, stdin=stdin))
        return self.hosts.transport.exec_command(*given, interactive=interactive, terminal=terminal)

    def run_inside(self, node: str, *argv: str, stdin: bytes | None = None, timeout: float | None = None) -> Completed:
        """Runs a command of the node's container; the caller checks the exit code."""
        return self.hosts[node].run(self.inside(node, *argv, stdin=stdin), timeout=timeout)

    def node_verb(
        self, node: str, *arguments: str, stdin: bytes | None = None, timeout: float | None = None
    ) -> Completed:
        """``python -m tridock.node …`` inside a node; the caller checks the exit code."""
        return self.run_inside(node, *NODE, *arguments, stdin=stdin, timeout=timeout)

    def ask(
        self, node: str, kind: type[T], *arguments: str, stdin: bytes | None = None, timeout: float | None = None
    ) -> T:
        """Returns the answer of ``python -m tridock.node …`` inside a node.

        Raises :class:`ClusterError` if the verb fails, or if the node's image is of another version of Tridock.
        """
        return self.answer(node, kind, arguments[0], self.node_verb(node, *arguments, stdin=stdin, timeout=timeout))

    def answer(self, node: str, kind: type[T], verb: str, done: Completed) -> T:
        """Returns the answer of a node's verb that has ended; raises as :meth:`ask` does."""
        if done.exit_code == USAGE:
            raise self.other_version(node, f"it does not know {verb}")
        if done.exit_code == _NOT_FOUND:
            raise self.other_version(node, f"it has no {run_folder.PYTHON}")
        try:
            return decode(kind, done.checked(node).stdout)
        except FormError as error:
            todo = "do not use this host before you know why: a node of Tridock's does not answer so"
            raise ClusterError(Problem(node, f"its answer to {verb} is refused", str(error), todo)) from None
        except ValueError:
            raise self.other_version(node, f"another form of answer to {verb}") from None

    def other_version(self, node: str, got: str) -> ClusterError:
        """The error of a node whose image is of another version of Tridock."""
        todo = f"run tridock image, then tridock up {self.cluster.hosts_option}"
        return ClusterError(Problem(node, "its image has another version of Tridock", got, todo))


def everywhere(client: NodeClient) -> NodeClient:
    """Returns a client of the hosts of ``client`` and of those others of its hostfile that answer; one that did not is
    not asked again."""
    cluster, ours = client.cluster.unfiltered, client.hosts
    every = Hosts(cluster, connect(cluster, once=True), quiet=ours.quiet)
    others = every.only(every.keys() - ours.keys() - ours.silent)
    if not others:
        return client
    with bars(quiet=ours.quiet) as begin:
        begin("look at the other hosts of the hostfile", None)
        outcomes = ask_states(others)
    states = {node: outcome.value for node, outcome in outcomes.items() if outcome.value is not None}
    if (silent := others.keys() - states.keys()) and not ours.quiet:
        names = cut(", ".join(sorted(silent)), 200)
        print(
            f"note: these hosts could not be asked, so their runs and checkpoints are not known: {names}",
            file=sys.stderr,
        )
    ours.silent.update(silent)
    hosts = {node: ours.get(node) or every[node] for node in every if node in client.states or node in states}
    return NodeClient(Hosts(cluster, hosts, quiet=ours.quiet), {**client.states, **states})


def reachable(hosts: Hosts) -> tuple[NodeClient, ClusterError | None]:
    """Returns a client of the hosts that answer, and the error of the others.

    For commands that show state, which users need most while a host is unreachable.
    """
    outcomes = ask_states(hosts)
    states = {node: outcome.value for node, outcome in outcomes.items() if outcome.value is not None}
    client = NodeClient(hosts.only(states), states)
    try:
        raise_failures(outcomes)
    except ClusterError as failure:
        return client, failure
    return client, None
