"""Removes runs that are over, or whose launch was interrupted: from every node of a cluster, or from this machine."""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.node_answers import Removal, RunInfo, Withdrawal
from tridock.contracts.run_state import RunState
from tridock.errors import Problem, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs.cluster_runs import by
from tridock.ops.runs.this_machine import ask_here

_TIMEOUT_S: Final = 1800.0
"""Of a removal on one node: terabytes of checkpoints on NFS."""
_WITHDRAW_S: Final = 60.0
Remove = Callable[[Sequence[RunInfo]], Collection[str]]
"""Removes runs, and returns those that stay."""


def runs_here(workspace: Path, *, sizes: bool = False) -> list[RunInfo]:
    """Returns the runs in ``runs/`` of a folder of this machine, oldest first."""
    argv = ("runs", "--workspace", str(workspace.absolute()), *["--sizes"] * sizes)
    return list(ask_here(tuple[RunInfo, ...], *argv, where=str(workspace), timeout=_TIMEOUT_S))


def remove_here(workspace: Path, runs: Sequence[RunInfo]) -> Collection[str]:
    argv = ("remove", "--workspace", str(workspace.absolute()), *(run.run_id for run in runs))
    return ask_here(Removal, *argv, where=str(workspace), timeout=_TIMEOUT_S).kept


def remove_on_cluster(client: NodeClient, runs: Sequence[RunInfo]) -> Collection[str]:
    """Removes runs from all nodes that are up, each first from its head, which knows whether it is in use."""

    def ask(node: str, ids: Sequence[str]) -> Sequence[str]:
        return client.ask(node, Removal, "remove", *ids, timeout=_TIMEOUT_S).kept if ids else ()

    def first(node: str, _: object) -> Sequence[str]:
        return ask(node, [run.run_id for run in runs if run.head == node])

    up = client.running()
    kept = {name for names in client.hosts.each(first, only=up).values() for name in names}
    gone = [run for run in runs if run.run_id not in kept]

    def then(node: str, _: object) -> Sequence[str]:
        return ask(node, [run.run_id for run in gone if run.head != node])

    return kept.union(*client.hosts.each(then, only=up).values())


def withdraw(client: NodeClient, run_id: str) -> bool:
    """Removes a run from every node that is up, unless it was started or is queued; returns whether it was."""

    def ask(node: str, _: object) -> bool:
        path = f"{run_folder.WORKSPACE}/runs/{run_id}"
        return client.ask(node, Withdrawal, "withdraw", path, timeout=_WITHDRAW_S).started

    head, *rest = client.running()  # the head first: it knows
    return any(client.hosts.each(ask, only=[head]).values()) or any(client.hosts.each(ask, only=rest).values())


def remove_interrupted(client: NodeClient, runs: Iterable[RunInfo]) -> None:
    """Removes those of the cluster's ``runs`` whose launch was killed. Only for who has the lock on the nodes: else
    their launch may go on."""
    up = {*client.running()}
    for run in runs:
        if run.state is RunState.INCOMPLETE and up.issuperset(run.nodes) and not withdraw(client, run.run_id):
            print(f"removed {run.run_id}{by(run)}: its launch was interrupted", file=sys.stderr)


def named(runs: Iterable[RunInfo], ids: Sequence[str]) -> list[RunInfo]:
    """Returns the runs with these ids. Raises :class:`RequestError` with each that is unknown or active."""
    known = {run.run_id: run for run in runs}
    problems = [Problem(name, "is not a run of these", "", "see tridock runs") for name in ids if name not in known]
    found = [known[name] for name in dict.fromkeys(ids) if name in known]
    problems += [Problem(run.run_id, "is running", "", "tridock stop ends it") for run in found if _is_active(run)]
    RequestError.raise_for(problems)
    return found


def prunable(
    runs: Sequence[RunInfo], now: datetime, *, days: float | None, keep: int | None, states: Collection[RunState]
) -> list[RunInfo]:
    """Returns those that are over and older than ``days``, not among the newest ``keep``, and in one of ``states``.

    What is None, or no state, selects all.
    """
    oldest_first = sorted(runs, key=lambda run: (run.created, run.run_id))
    rest = oldest_first if keep is None else oldest_first[: max(0, len(runs) - keep)]
    before = None if days is None else f"{now - timedelta(days=days):%Y%m%d-%H%M%S}"
    return [
        run
        for run in rest
        if not _is_active(run)
        and (run.state in states if states else run.state.is_over)
        and (before is None or run.created < before)
    ]


def _is_active(run: RunInfo) -> bool:
    return run.state.is_active or run.has_processes


def refuse_kept(kept: Collection[str]) -> None:
    """Raises :class:`RequestError` with the runs that stay."""
    what = "stays: it is running or queued, or a running one began from its checkpoint"
    if kept:
        raise RequestError([Problem(name, what, "", "stop or cancel that first") for name in sorted(kept)])
