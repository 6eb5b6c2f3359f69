"""A cluster in use: one connection a host, the hosts' states, and commands inside the nodes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tridock.cluster.settings import Cluster, load_cluster
from tridock.cluster.transports import transport_of
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import USAGE
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.facts import HostState, docker_hangs, facts_command, parse_facts, split_answer
from tridock.remote import Completed, Host, connect, on_all, raise_failures
from tridock.remote.host import shortened

T = TypeVar("T")

FACTS_TIMEOUT_S = 30.0
_KEEP_S = 900.0
_NOT_FOUND = 127  # of docker exec, as of a shell
# -P: not the code of a folder that happens to be the current one.
NODE = (run_folder.PYTHON, "-P", "-m", "tridock.node")


class Session:
    """Hosts of one cluster by node name, in the hostfile's order; facts are read once and kept."""

    def __init__(self, cluster: Cluster, *, ahead: bool = False) -> None:
        self.cluster = cluster
        self.transport = transport_of(cluster)
        self.hosts: Mapping[str, Host] = connect(cluster, ahead=ahead)
        self.quiet = False
        """Whether long work shows no progress."""
        self.reads_keys = True
        """Whether the hosts' facts include the digest of their keys."""
        self.keeps_shells = False
        """Whether the shell that reads a host's facts waits for the next command there."""
        self._states: dict[str, HostState] | None = None
        self._question: Callable[[str], tuple[str, ...]] = lambda _: ()
        self._answers: dict[str, tuple[tuple[str, ...], Completed]] = {}

    @classmethod
    def open(
        cls,
        hostfile: Path,
        include: str = "",
        exclude: str = "",
        change: Callable[[Cluster], Cluster] = lambda cluster: cluster,
        *,
        ahead: bool = False,
    ) -> Session:
        """Loads the cluster, as ``change`` leaves it, and prepares its connections; ``ahead`` opens them meanwhile."""
        return cls(change(load_cluster(hostfile, include=include, exclude=exclude)), ahead=ahead)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names; the head comes first."""
        return tuple(self.hosts)

    @property
    def head(self) -> str:
        """The first node: launchers run there."""
        return self.nodes[0]

    @property
    def keep_s(self) -> float:
        """Seconds for which shells are kept on the hosts."""
        return _KEEP_S if self.keeps_shells else 0

    def each(self, action: Callable[[str, Host], T], only: tuple[str, ...] | None = None) -> dict[str, T]:
        """Runs an action on every host at once, under the cluster's cap; all failures in one error."""
        hosts = {name: host for name, host in self.hosts.items() if only is None or name in only}
        return raise_failures(on_all(hosts, action, cap=self.cluster.settings.ssh.max_connections))

    def at_once(self, *questions: Callable[[], object]) -> None:
        """Asks the hosts several things at the same time. Raises the error of the first question that failed.

        Ctrl-C closes the connections in use, and reaches the caller at once.
        """
        errors: dict[int, BaseException] = {}

        def ask(place: int, question: Callable[[], object]) -> None:
            try:
                question()
            except BaseException as error:
                errors[place] = error

        threads = [threading.Thread(target=ask, args=it, daemon=True) for it in enumerate(questions)]
        for thread in threads:
            thread.start()
        try:
            for place, thread in enumerate(threads):
                thread.join()
                if place in errors:
                    break
        except BaseException:
            for host in self.hosts.values():
                host.close()
            raise
        for place in sorted(errors):
            raise errors[place]

    def states(self) -> dict[str, HostState]:
        """What every host says about itself; read at the first call."""
        if self._states is None:
            self._states = self.each(self.read_state)
        return self._states

    def reachable(self) -> tuple[Session, ClusterError | None]:
        """Returns this session with only the hosts that report their facts, and the error of the others.

        For commands that show state, which users need most while a host is unreachable.
        """
        outcomes = on_all(self.hosts, self.read_state, cap=self.cluster.settings.ssh.max_connections)
        there = copy.copy(self) if any(not outcome.ok for outcome in outcomes.values()) else self
        there.hosts = {name: host for name, host in self.hosts.items() if outcomes[name].ok}
        there._states = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
        try:
            raise_failures(outcomes)
        except ClusterError as failure:
            return there, failure
        return there, None

    def forget_states(self) -> None:
        """Makes the next call of :meth:`states` ask the hosts again."""
        self._states = None
        self._answers.clear()

    def ask_with_states(self, *argv: str, nodes: Container[str] | None = None) -> None:
        """From now on the command that reads a host's facts also runs ``argv`` in its node, where that is up and ours.

        Saves each of these nodes a command: the first that runs the same there gets the answer. ``argv`` must change
        nothing.
        """
        self._question = lambda node: argv if nodes is None or node in nodes else ()

    def read_state(self, name: str, host: Host) -> HostState:
        """Queries a host. Raises :class:`ClusterError` if its container belongs to another folder."""
        transport, question = self.transport, self._question(name)
        command = facts_command(
            self.cluster.settings.image,
            transport.container_name(name),
            transport.secrets_folder(name) if self.reads_keys else "",
            transport.images_file(name),
            transport.workspace_label(),
            (*transport.exec_place(name), *question) if question else (),
            keep=self.keeps_shells,
        )
        output, done, until = bytearray(), None, time.monotonic() + FACTS_TIMEOUT_S
        try:
            done = host.read_into(output.extend, command, timeout=FACTS_TIMEOUT_S, keep=self.keep_s)
        except ClusterError:
            facts, answer = split_answer(bytes(output))
            if answer is None:
                hung = docker_hangs(transport.host_label(name), facts, FACTS_TIMEOUT_S)
                if hung is not None and time.monotonic() >= until:
                    raise ClusterError(hung) from None
                raise
            # The facts are there. Who needs the answer asks again, with a time limit of its own.
        facts, answer = split_answer(bytes(output))
        if done is not None and answer is None:
            replace(done, stdout=bytes(output)).checked(name)
        elif done is not None and answer is not None:
            self._answers[name] = question, replace(done, stdout=answer)
        where = transport.host_label(name)
        state = parse_facts(where, facts)
        ours = transport.workspace(state.facts)
        if state.container is not None and state.container.workspace not in (None, ours):
            container, theirs = transport.container_name(name), state.container.workspace
            self._answers.pop(name, None)
            what, got = f"its container {container} belongs to another folder", f"{theirs}, and this one's is {ours}"
            todo = "use that folder (workdir), or give this cluster another name: rename its hostfile"
            raise ClusterError(Problem(where, what, got, todo))
        return state

    def workspace(self, node: str) -> str:
        """The folder on the node's host that its container mounts as /workspace."""
        return self.transport.workspace(self.states()[node].facts)

    def inside(self, node: str, *argv: str, stdin: bytes | None = None, interactive: bool = False) -> Command:
        """A command of the node's container, as the argv that its host executes."""
        command = Command(argv, stdin=stdin)
        return self.transport.exec_command(node, self.states()[node].facts, command, interactive=interactive)

    def node_verb(
        self, node: str, *arguments: str, stdin: bytes | None = None, timeout: float | None = None
    ) -> Completed:
        """``python -m tridock.node …`` inside a node; the caller checks the exit code."""
        return self.run_inside(node, *NODE, *arguments, stdin=stdin, timeout=timeout)

    def run_inside(self, node: str, *argv: str, stdin: bytes | None = None, timeout: float | None = None) -> Completed:
        """Runs a command of the node's container; the caller checks the exit code."""
        command = self.inside(node, *argv, stdin=stdin)
        if stdin is None and self._answers.get(node, ((), None))[0] == argv:
            return replace(self._answers.pop(node)[1], command=shortened(command))
        return self.hosts[node].run(command, timeout=timeout)

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
        except ValueError:
            raise self.other_version(node, f"another form of answer to {verb}") from None

    def other_version(self, node: str, got: str) -> ClusterError:
        """The error of a node whose image is of another version of Tridock."""
        todo = f"run tridock image, then tridock up {self.cluster.hosts_option}"
        return ClusterError(Problem(node, "its image has another version of Tridock", got, todo))

    def running(self) -> tuple[str, ...]:
        """The nodes that are running. Raises :class:`ClusterError` where there is none."""
        found = tuple(node for node, state in self.states().items() if state.container and state.container.running)
        if not found:
            todo = f"run tridock up {self.cluster.hosts_option}"
            raise ClusterError(Problem(node, "its node is not running", "", todo) for node in self.nodes)
        return found
