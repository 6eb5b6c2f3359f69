"""From a prepared experiment to a run on the nodes of its cluster: what `tridock launch` and `tridock run` share."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.node_answers import Withdrawal
from tridock.errors import TridockError
from tridock.experiment.command import CommandExperiment
from tridock.experiment.schema import Experiment
from tridock.launchers.bundle import RunBundle
from tridock.ops.doctor import ask_for_quick_reports, check_quickly
from tridock.ops.hosts.nodes import ensure_up
from tridock.ops.hosts.session import Session
from tridock.ops.runs.provenance import Approve
from tridock.ops.runs.registry import refuse_slots_in_use, require_queue_node, slots_in_use
from tridock.ops.runs.sinks import check_on_head, sinks_of
from tridock.ops.runs.start import host_folder, start
from tridock.remote import Host

T = TypeVar("T")
_TIMEOUT_S = 60.0


def start_on_nodes(
    session: Session,
    experiment: Experiment | CommandExperiment,
    ask: Callable[[], T],
    bundle_of: Callable[[str, T], RunBundle],
    put: Callable[[RunBundle], object],
    *,
    check: bool,
    share: bool,
    queue: bool,
    approve: Approve | None,
) -> RunBundle:
    """Brings the nodes up, asks them what the run needs, writes its files on all of them and starts it on the head.

    ``ask`` returns what the nodes must answer before the run's files can be written; ``bundle_of`` makes these files
    from the image's id and that answer; ``put`` writes them. ``check`` runs the doctor's quick checks first. ``share``
    allows slots that another run has in use; with ``queue`` the run waits for them. ``approve`` is called with the
    run's manifest and plan before anything is written, and may raise. An error or Ctrl-C leaves no
    files behind, as long as the head can say that the run has not started.
    """
    sinks = sinks_of(experiment)
    if queue:
        require_queue_node(session)
    if check:
        ask_for_quick_reports(session)
    image_id = ensure_up(session)
    answers: list[T] = []
    questions: list[Callable[[], object]] = []
    if not share and not queue:
        questions.append(lambda: refuse_slots_in_use(session))
    if check and not (queue and slots_in_use(session)):  # busy devices would fail the checks
        on_cpu = experiment.env.get("DS_ACCELERATOR") == "cpu"
        questions.append(lambda: check_quickly(session, on_cpu=on_cpu))
    questions.append(lambda: check_on_head(session, sinks))
    questions.append(lambda: answers.append(ask()))
    session.at_once(*questions)
    (answer,) = answers
    bundle = bundle_of(image_id, answer)
    if approve is not None:
        approve(*(json.loads(bundle.files[name]) for name in (run_folder.MANIFEST, run_folder.PLAN)))
    try:
        put(bundle)
        return start(session, bundle, sinks, queue=queue)
    except (TridockError, KeyboardInterrupt):
        # Folders on only some nodes would look like a run that never starts.
        with suppress(TridockError):
            withdraw(session, bundle)
        raise


def withdraw(session: Session, bundle: RunBundle) -> None:
    """Removes a run's folder from every node, unless the run was started or is queued, and only the answer was lost."""
    if session.ask(session.head, Withdrawal, "withdraw", bundle.path, timeout=_TIMEOUT_S).started:
        print(f"run {bundle.run_id} has started, or is queued; see tridock status", file=sys.stderr)
        return

    def remove(node: str, host: Host) -> None:
        host.run(Command.of("rm", "-rf", host_folder(session, node, bundle)), timeout=_TIMEOUT_S)

    session.each(remove, only=session.nodes[1:])  # the head has removed its own
