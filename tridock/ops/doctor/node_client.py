"""Questions to the nodes: one verb of ``tridock.node`` each, answered in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from tridock.errors import ClusterError, Problem, TridockError
from tridock.ops.doctor.finding import Answer, fail
from tridock.ops.doctor.report import Report
from tridock.ops.hosts.session import Session
from tridock.remote import Host, on_all, raise_failures

T = TypeVar("T")

LOOK_S: Final = 20.0
_USAGE: Final = 2


def verb(session: Session, node: str, timeout: float, *words: str) -> Answer:
    """What ``python -m tridock.node …`` says there; raises :class:`ClusterError` where it says nothing of use."""
    done = session.node_verb(node, *words, timeout=timeout)
    if done.exit_code == _USAGE and b"invalid choice" in done.stderr:
        todo = f"run make image, then fab up --hosts {session.cluster.hostfile_path}"
        raise ClusterError(Problem(node, "its image is older than this Tridock", f"it does not know {words[0]}", todo))
    answer: Answer = json.loads(done.checked(node).stdout)
    return answer


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
            return verb(session, node, LOOK_S, "host-key")["key"]
        except ClusterError:
            return None

    return ask
