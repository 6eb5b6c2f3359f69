"""Questions to the nodes: one verb of ``tridock.node`` each, answered in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from tridock.contracts.node_answers import PROTOCOL, USAGE
from tridock.errors import ClusterError, Problem, TridockError
from tridock.ops.doctor.finding import Answer, fail
from tridock.ops.doctor.report import Report
from tridock.ops.hosts.session import Session
from tridock.remote import Host, on_all, raise_failures

T = TypeVar("T")

REPORT_TIMEOUT_S: Final = 20.0


def verb(session: Session, node: str, timeout: float, *arguments: str) -> Answer:
    """The answer of ``python -m tridock.node …`` on a node. Raises :class:`ClusterError` if there is none."""
    done = session.node_verb(node, *arguments, timeout=timeout)
    if done.exit_code == USAGE:
        raise _other_version(session, node, f"it does not know {arguments[0]}")
    answer: Answer = json.loads(done.checked(node).stdout)
    return answer


def node_report(session: Session, node: str, *arguments: str) -> Answer:
    """What a node reports of itself. Raises :class:`ClusterError` if its image has another protocol."""
    report = verb(session, node, REPORT_TIMEOUT_S, "node-report", *arguments)
    if report.get("protocol") != PROTOCOL:
        raise _other_version(session, node, f"protocol {report.get('protocol', 'unknown')}, {PROTOCOL} here")
    return report


def _other_version(session: Session, node: str, got: str) -> ClusterError:
    todo = f"run make image, then fab up --hosts {session.cluster.hostfile_path}"
    return ClusterError(Problem(node, "its image is of another version of Tridock", got, todo))


def asked(session: Session, report: Report, nodes: Sequence[str], ask: Callable[[str, Host], T]) -> dict[str, T]:
    """The answers of those that gave one; the others are found to be at fault."""
    hosts = {node: session.hosts[node] for node in nodes}
    outcomes = on_all(hosts, ask, cap=session.cluster.settings.ssh.max_connections)
    for outcome in outcomes.values():
        if isinstance(outcome.error, TridockError):
            why = "its container does not answer the doctor, and would not answer a launch"
            report.findings += [fail("nodes", problem, why) for problem in outcome.error.problems]
    return raise_failures({node: it for node, it in outcomes.items() if not isinstance(it.error, TridockError)})


def shown_key(session: Session) -> Callable[[str], str | None]:
    def ask(node: str) -> Any:
        try:
            return verb(session, node, REPORT_TIMEOUT_S, "host-key")["key"]
        except ClusterError:
            return None

    return ask
