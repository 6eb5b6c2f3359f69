"""The runs of a cluster: lists them, reads their state, and stops one."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from tridock.contracts import run_folder
from tridock.contracts.node_answers import QueuedRun, RunInfo, Stopped
from tridock.contracts.records import whole_plan
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.provenance import operator
from tridock.remote import Host

R = TypeVar("R", "Run", RunInfo)

_VERB_TIMEOUT_S = 60.0
_SIZES_TIMEOUT_S = 300.0
"""Of a verb that looks at every file of every run."""
_QUEUE_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run by its id, and the node that leads it, which with filters is not the hostfile's first."""

    run_id: str
    head: str
    elsewhere: tuple[str, ...] = ()
    """Its nodes that are not in the hostfile."""
    started_by: str = ""


def list_runs(client: NodeClient, *, sizes: bool = False) -> list[RunInfo]:
    """Returns the runs of the nodes that are up, oldest first; with ``sizes``, what they take on the nodes' disks.

    What a run is, its processes say: it runs although its head is not in the hostfile, or does not answer.
    """

    def ask(node: str, _: Host) -> tuple[RunInfo, ...]:
        options, limit = (["--sizes"], _SIZES_TIMEOUT_S) if sizes else ([], _VERB_TIMEOUT_S)
        return client.ask(node, tuple[RunInfo, ...], "runs", *options, timeout=limit)

    found: dict[str, RunInfo] = {}
    on_disk: dict[str, dict[str, int]] = defaultdict(dict)
    for node, runs in client.hosts.each(ask, only=client.running()).items():
        for run in runs:
            known = found.get(run.run_id)
            on_disk[run.run_id][run.folder_id] = run.disk_bytes or 0
            slots = run.slots or (known.slots if known else {})
            lives = run.has_processes or (known is not None and known.has_processes)
            if known is None or run.state.precedence > known.state.precedence:
                known = replace(run, head=node)
            found[run.run_id] = replace(known, slots=slots, has_processes=lives)
    if sizes:
        found = {name: replace(run, disk_bytes=sum(on_disk[name].values())) for name, run in found.items()}
    for run in found.values():
        if run.has_processes and not run.state.is_over:
            found[run.run_id] = replace(run, state=RunState.RUNNING)
        elif run.state.is_over and run.state is not RunState.LOST:
            found[run.run_id] = replace(run, slots={})
    return sorted(found.values(), key=lambda run: (run.created, run.run_id))


def others(runs: Iterable[R]) -> list[R]:
    """Returns the runs that somebody else has started, or the same user on another machine."""
    return [run for run in runs if run.started_by not in ("", operator())]


def refuse_others(runs: Iterable[R]) -> None:
    """Raises :class:`RequestError` with the runs that somebody else has started."""
    RequestError.raise_for(
        Problem(it.run_id, f"was not started by you ({operator()})", it.started_by, "ask them, or give --force")
        for it in others(runs)
    )


def slots_in_use(client: NodeClient, runs: Iterable[RunInfo] | None = None) -> list[tuple[RunInfo, str]]:
    """Returns the active runs (of ``runs``, if they are known) that use slots of this cluster, with those slots."""
    found = []
    for run in list_runs(client) if runs is None else runs:
        shared = {node: sorted({*run.slots.get(node, ())} & {*slots}) for node, slots in client.cluster.slots.items()}
        if got := of_nodes(shared):
            found.append((run, got))
    return found


def refuse_slots_in_use(client: NodeClient, runs: Iterable[RunInfo] | None = None) -> None:
    """Raises :class:`RequestError` with the active runs that use slots of this cluster."""
    problems = []
    for run, slots in slots_in_use(client, runs):
        see = f"tridock logs {client.cluster.hosts_option} --run {run.run_id}"
        todo = f"wait for it (--queue; {see}), stop it (tridock stop), leave its slots out (--exclude),"
        todo += " or give --share"
        got = slots + by(run) + until(run, datetime.now(UTC))
        problems.append(Problem(run.run_id, "is running on slots that this run would use", got, todo))
    RequestError.raise_for(problems)


def of_nodes(slots: Mapping[str, Sequence[int]]) -> str:
    """Returns slots for a message: ``host-a: 0,1, host-b: 0``."""
    return ", ".join(f"{node}: {','.join(map(str, numbers))}" for node, numbers in slots.items() if numbers)


def by(run: RunInfo) -> str:
    """Returns who has started a run, for a message; empty if unknown."""
    return f", started by {run.started_by}" if run.started_by else ""


def until(run: RunInfo, now: datetime) -> str:
    """Returns about when a run ends, from its last step time and remaining iterations; empty if unknown."""
    metrics = run.metrics or {}
    step, done = metrics.get("step_time_s"), metrics.get("iteration")
    if not isinstance(step, int | float) or not isinstance(done, int) or run.train_iters is None:
        return ""
    end = now + timedelta(seconds=step * max(0, run.train_iters - done))
    form = "%H:%M" if end.date() == now.date() else "%Y-%m-%d %H:%M"
    return f", until about {end:{form}} UTC (iteration {done} of {run.train_iters})"


def require_queue_node(hosts: Hosts) -> None:
    """Raises :class:`RequestError` if the slots exclude the node that holds the queue, the hostfile's first."""
    first = hosts.cluster.nodes[0].name
    if hosts.head != first:
        what, todo = f"is kept on {first}, which this run does not use", "use a slot of it, or launch without --queue"
        raise RequestError(Problem("--queue", what, f"head {hosts.head}", todo))


def queued_runs(client: NodeClient) -> list[QueuedRun]:
    """Returns the queued runs in order; starts those whose slots have become free."""
    node = client.cluster.nodes[0].name
    if node not in client.hosts or node not in client.running():
        return []
    return list(client.ask(node, tuple[QueuedRun, ...], "queue", timeout=_QUEUE_TIMEOUT_S))


def cancel(client: NodeClient, run_id: str | None, *, force: bool = False) -> str:
    """Removes a run from the queue: the named one, or the only one queued; without ``force`` only one's own.

    Returns its id.
    """
    waiting = [run.run_id for run in queued_runs(client)]
    if run_id is None:
        if len(waiting) != 1:
            what = "no run waits" if not waiting else "is needed while several runs wait"
            raise RequestError(Problem("--run", what, ", ".join(waiting), "see tridock status"))
        run_id = waiting[0]
    if not force:
        refuse_others(run for run in list_runs(client) if run.run_id == run_id)
    node = client.cluster.nodes[0].name
    path = f"{run_folder.WORKSPACE}/runs/{run_id}"
    done = client.node_verb(node, "cancel", path, timeout=_QUEUE_TIMEOUT_S)
    if done.exit_code == RequestError.exit_code:
        todo = f"use one of: {', '.join(waiting) or 'none'}; tridock stop ends one that is running"
        raise RequestError(Problem("--run", "is not a queued run", run_id, todo))
    done.checked(node)
    return run_id


def choose_run(client: NodeClient, run_id: str | None, *, active: bool) -> Run:
    """Returns the run of a command: the named one, else the only active one, else (logs, fetch) the last.

    Raises :class:`RequestError` if the name is unknown, or if several are active and none is named.
    """
    runs = list_runs(client)
    listed = {node.name for node in client.cluster.nodes}
    known = {
        it.run_id: Run(it.run_id, it.head, tuple(n for n in it.nodes if n not in listed), it.started_by) for it in runs
    }
    if run_id is not None:
        if run_id not in known:
            last = ", ".join(list(known)[-5:]) or "none"
            raise RequestError(Problem("--run", "is not a run of this cluster", run_id, f"use one of: {last}"))
        return known[run_id]
    running = [run.run_id for run in runs if run.state.is_active]
    if len(running) > 1:
        got = ", ".join(running)
        raise RequestError(Problem("--run", "is required because several runs are active", got, "name one of them"))
    if running:
        return known[running[0]]
    if active or not known:
        what = "no run is active" if active else "there is no run yet"
        raise RequestError(Problem("--run", what, "", "see tridock status"))
    return list(known.values())[-1]


def stop(client: NodeClient, run: Run) -> list[str]:
    """Ends only the run's processes on every node that is up; returns these nodes.

    How many processes a node still has when it is asked is up to chance: nodes end theirs when the head is gone.
    """

    def end(node: str, _: Host) -> Stopped:
        return client.ask(node, Stopped, "stop", run.run_id, timeout=_VERB_TIMEOUT_S)

    return list(client.hosts.each(end, only=client.running()))


def plan_of(client: NodeClient, run: Run) -> dict[str, Any]:
    """Returns the plan in the run's folder. Raises :class:`ClusterError` if the head has none."""
    path = f"{run_folder.WORKSPACE}/runs/{run.run_id}/{run_folder.PLAN}"
    done = client.run_inside(run.head, "cat", path, timeout=_VERB_TIMEOUT_S)
    if done.exit_code:
        stderr = done.stderr.decode(errors="replace").strip()
        raise ClusterError(Problem(run.head, f"cannot read {path}", stderr, "see tridock status"))
    with suppress(ValueError, RecursionError):
        if plan := whole_plan(json.loads(done.stdout)):
            return plan
    raise ClusterError(Problem(run.head, f"has a damaged {path}", "", "look at that node; see tridock status"))


def folder_of(client: NodeClient, run: Run) -> str:
    """Returns the location of the run's folder for messages: a local path for the twin, ``host:path`` over ssh."""
    path = f"{client.workspace(run.head)}/runs/{run.run_id}"
    return f"{run.head}:{path}" if client.hosts.transport.separate_hosts else path


def parse_rank(text: str) -> int:
    """Returns the rank that ``--rank`` names. Raises :class:`RequestError` if it is not a whole number."""
    if not text.isdecimal():
        raise RequestError(Problem("--rank", "must be a whole number", repr(text), "give a rank's number"))
    return int(text)
