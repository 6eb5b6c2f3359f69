"""A run's first files on every node, and its start on the head: what `tridock launch` and `tridock run` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tridock.contracts import run_folder
from tridock.contracts.node_answers import PreflightAnswer, QueuedRun
from tridock.contracts.supervision import Supervision, contract
from tridock.errors import TridockError

if TYPE_CHECKING:  # a run on one machine needs no ssh, and its image lacks the packages for it
    from tridock.launchers.bundle import RunBundle
    from tridock.ops.hosts.session import Session
    from tridock.ops.runs.sinks import Sinks
    from tridock.remote import Host

_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 180.0


def refuse_other_contract(session: Session, answer: PreflightAnswer) -> None:
    """Raises :class:`ClusterError` if the head's image cannot read the run files that this code writes."""
    if answer.contract != contract():
        raise session.other_version(session.head, f"contract {answer.contract or 'unknown'}, {contract()} here")


def start(session: Session, bundle: RunBundle, sinks: Sinks, *, queue: bool = False) -> RunBundle:
    """Starts a run on the head or queues it; sends the secrets of its sinks over standard input."""
    secrets = json.dumps(dict(sinks.secrets)).encode() if sinks.secrets else None
    options = ("--secrets",) if secrets else ()
    if queue:
        argv = ("enqueue", bundle.path, *options)
        queued = session.ask(session.head, QueuedRun, *argv, stdin=secrets, timeout=_QUEUE_TIMEOUT_S)
        _share_secrets(session, bundle, secrets)
        return replace(bundle, waits_for=None if queued.started else queued.waits_for)
    argv = ("start", bundle.path, *options)
    session.node_verb(session.head, *argv, stdin=secrets, timeout=_TIMEOUT_S).checked(session.head)
    _share_secrets(session, bundle, secrets)
    return bundle


def _share_secrets(session: Session, bundle: RunBundle, secrets: bytes | None) -> None:
    """Sends the secrets of a started run to the nodes that may supervise it if the head is lost."""
    supervision = Supervision.from_json(bundle.files[run_folder.SUPERVISION].decode())
    if secrets is None or not supervision.may_be_taken_over:
        return

    def keep(node: str, _: Host) -> None:
        session.node_verb(node, "keep-secrets", bundle.path, stdin=secrets, timeout=_TIMEOUT_S).checked(node)

    try:
        session.each(keep, only=supervision.remote)
    except TridockError as error:
        print(f"warning: without the head this run would be sent to no tracker or address: {error}", file=sys.stderr)


def put_files(session: Session, bundle: RunBundle) -> None:
    """Writes the first files of a run into its folder on every node."""
    files_on = first_files(session, bundle)
    session.each(lambda node, host: host.put_tree(files_on(node), host_folder(session, node, bundle), mode=0o644))


def first_files(session: Session, bundle: RunBundle) -> Callable[[str], Mapping[str, bytes]]:
    """Returns the first files of a run by node: the scripts of other nodes only for the head.

    With the scripts of all nodes on each, the traffic would grow as the square of the nodes.
    """
    nodes = tuple(Supervision.from_json(bundle.files[run_folder.SUPERVISION].decode()).ranks)
    common, own = dict[str, bytes](), dict[str, dict[str, bytes]]()
    for name, content in bundle.files.items():
        rank = run_folder.node_rank_of(name)
        files = common if rank is None else own.setdefault(nodes[rank], {})
        files[name] = content
    return lambda node: bundle.files if node == session.head else {**common, **own.get(node, {})}


def host_folder(session: Session, node: str, bundle: RunBundle) -> str:
    """Returns the run's folder on a node's host."""
    return f"{session.workspace(node)}/runs/{bundle.run_id}"
