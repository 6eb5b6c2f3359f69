"""The runs of a cluster: lists them, reads their state, and stops one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tridock.contracts import run_folder
from tridock.contracts.node_answers import Process, QueuedRun, RunInfo, Stopped
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.session import NODE, Session
from tridock.remote import Host

if TYPE_CHECKING:
    from tridock.experiment import Experiment

_VERB_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run by its id, and the node that leads it, which with filters is not the hostfile's first."""

    run_id: str
    head: str


def active_runs(session: Session, nodes: tuple[str, ...]) -> dict[str, list[str]]:
    """Returns the ids of the runs that have processes on each of ``nodes``."""

    def ask(node: str, _: Host) -> list[str]:
        processes = session.ask(node, tuple[Process, ...], "processes", timeout=_VERB_TIMEOUT_S)
        return sorted({process.run_id for process in processes})

    return session.each(ask, only=nodes) if nodes else {}


def ask_for_runs(session: Session) -> None:
    """Lets the command that reads a host's facts ask for its runs too, for :func:`list_runs`."""
    session.ask_with_states(*NODE, "runs")


def list_runs(session: Session) -> list[RunInfo]:
    """Returns the runs of the nodes that are up, oldest first."""

    def ask(node: str, _: Host) -> tuple[RunInfo, ...]:
        return session.ask(node, tuple[RunInfo, ...], "runs", timeout=_VERB_TIMEOUT_S)

    ask_for_runs(session)
    found: dict[str, RunInfo] = {}
    for node, runs in session.each(ask, only=session.running()).items():
        for run in runs:
            known = found.get(run.run_id)
            if known is None or run.state.precedence > known.state.precedence:
                found[run.run_id] = replace(run, head=node)
    return sorted(found.values(), key=lambda run: (run.created, run.run_id))


def slots_in_use(session: Session) -> list[tuple[RunInfo, str]]:
    """Returns the active runs that use slots of this cluster, with those slots."""
    found = []
    for run in list_runs(session):
        shared = {node: sorted({*run.slots.get(node, ())} & {*slots}) for node, slots in session.cluster.slots.items()}
        if got := ", ".join(f"{node}: {','.join(map(str, slots))}" for node, slots in shared.items() if slots):
            found.append((run, got))
    return found


def refuse_slots_in_use(session: Session) -> None:
    """Raises :class:`RequestError` with the active runs that use slots of this cluster."""
    problems = []
    for run, slots in slots_in_use(session):
        see = f"tridock logs {session.cluster.hosts_option} --run {run.run_id}"
        todo = f"wait for it (--queue; {see}), stop it (tridock stop), leave its slots out (--exclude),"
        todo += " or give --share"
        got = slots + until(run, datetime.now(UTC))
        problems.append(Problem(run.run_id, "is running on slots that this run would use", got, todo))
    if problems:
        raise RequestError(problems)


def until(run: RunInfo, now: datetime) -> str:
    """Returns about when a run ends, from its last step time and remaining iterations; empty if unknown."""
    metrics = run.metrics or {}
    step, done = metrics.get("step_time_s"), metrics.get("iteration")
    if not isinstance(step, int | float) or not isinstance(done, int) or run.train_iters is None:
        return ""
    end = now + timedelta(seconds=step * max(0, run.train_iters - done))
    form = "%H:%M" if end.date() == now.date() else "%Y-%m-%d %H:%M"
    return f", until about {end:{form}} UTC (iteration {done} of {run.train_iters})"


def require_queue_node(session: Session) -> None:
    """Raises :class:`RequestError` if the slots exclude the node that holds the queue, the hostfile's first."""
    first = session.cluster.nodes[0].name
    if session.head != first:
        what, todo = f"is kept on {first}, which this run does not use", "use a slot of it, or launch without --queue"
        raise RequestError(Problem("--queue", what, f"head {session.head}", todo))


def queued_runs(session: Session) -> list[QueuedRun]:
    """Returns the queued runs in order; starts those whose slots have become free."""
    node = session.cluster.nodes[0].name
    if node not in session.hosts or node not in session.running():
        return []
    return list(session.ask(node, tuple[QueuedRun, ...], "queue", timeout=_QUEUE_TIMEOUT_S))


def cancel(session: Session, run_id: str | None) -> str:
    """Removes a run from the queue: the named one, or the only one queued. Returns its id."""
    waiting = [run.run_id for run in queued_runs(session)]
    if run_id is None:
        if len(waiting) != 1:
            what = "no run waits" if not waiting else "is needed while several runs wait"
            raise RequestError(Problem("--run", what, ", ".join(waiting), "see tridock status"))
        run_id = waiting[0]
    node = session.cluster.nodes[0].name
    path = f"{run_folder.WORKSPACE}/runs/{run_id}"
    done = session.node_verb(node, "cancel", path, timeout=_QUEUE_TIMEOUT_S)
    if done.exit_code == RequestError.exit_code:
        todo = f"use one of: {', '.join(waiting) or 'none'}; tridock stop ends one that is running"
        raise RequestError(Problem("--run", "is not a queued run", run_id, todo))
    done.checked(node)
    return run_id


def choose_run(session: Session, run_id: str | None, *, active: bool) -> Run:
    """Returns the run of a command: the named one, else the only active one, else (logs, fetch) the last.

    Raises :class:`RequestError` if the name is unknown, or if several are active and none is named.
    """
    runs = list_runs(session)
    known = {run.run_id: run.head for run in runs}
    where = "--run"
    if run_id is not None:
        if run_id not in known:
            last = ", ".join(list(known)[-5:]) or "none"
            raise RequestError(Problem(where, "is not a run of this cluster", run_id, f"use one of: {last}"))
        return Run(run_id, known[run_id])
    running = [run.run_id for run in runs if run.state.is_active]
    if len(running) > 1:
        got = ", ".join(running)
        raise RequestError(Problem(where, "is required because several runs are active", got, "name one of them"))
    if running:
        return Run(running[0], known[running[0]])
    if active or not known:
        what = "no run is active" if active else "there is no run yet"
        raise RequestError(Problem(where, what, "", "see tridock status"))
    return Run(*list(known.items())[-1])


def stop(session: Session, run: Run) -> list[str]:
    """Ends only the run's processes on every node that is up; returns these nodes.

    How many processes a node still has when it is asked is up to chance: nodes end theirs when the head is gone.
    """

    def end(node: str, _: Host) -> Stopped:
        return session.ask(node, Stopped, "stop", run.run_id, timeout=_VERB_TIMEOUT_S)

    return list(session.each(end, only=session.running()))


def plan_of(session: Session, run: Run) -> dict[str, Any]:
    """Returns the plan in the run's folder."""
    path = f"{run_folder.WORKSPACE}/runs/{run.run_id}/{run_folder.PLAN}"
    return dict(json.loads(_read(session, run.head, path)))


def folder_of(session: Session, run: Run) -> str:
    """Returns the location of the run's folder for messages: a local path for the twin, ``host:path`` over ssh."""
    return session.transport.path_label(run.head, f"{session.workspace(run.head)}/runs/{run.run_id}")


def parse_rank(text: str) -> int:
    """Returns the rank that ``--rank`` names. Raises :class:`RequestError` if it is not a whole number."""
    if not text.isdecimal():
        raise RequestError(Problem("--rank", "must be a whole number", repr(text), "give a rank's number"))
    return int(text)


def experiment_of(session: Session, run: Run) -> Experiment:
    """Returns the experiment in the run's folder."""
    from tridock.experiment import parse_experiment

    path = f"{run_folder.WORKSPACE}/runs/{run.run_id}/{run_folder.EXPERIMENT}"
    return parse_experiment(_read(session, run.head, path).decode(), path)


def _read(session: Session, node: str, path: str) -> bytes:
    done = session.hosts[node].run(session.inside(node, "cat", path), timeout=_VERB_TIMEOUT_S)
    if done.exit_code:
        stderr = done.stderr.decode(errors="replace").strip()
        raise ClusterError(Problem(node, f"cannot read {path}", stderr, "see tridock status"))
    return done.stdout
