"""``fab data`` and ``tridock data sync``: one request, one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from tridock.experiment import Experiment
from tridock.ops.hosts.session import Session
from tridock.ops.runs.launch import DEFAULT_CONFIG
from tridock.ops.runs.preflight import data_files
from tridock.ops.runs.prepare import assumptions_for, prepare
from tridock.ops.sync.files import Chosen, choose, of_experiment
from tridock.ops.sync.maps import bring_index_maps
from tridock.ops.sync.operation import Row, sync
from tridock.ops.sync.shared import OPERATOR
from tridock.plan import Plan


def run(
    session: Session,
    paths: Sequence[str],
    config: str,
    overrides: Sequence[str],
    say: Callable[[str | Table], object],
    *,
    dry_run: bool = False,
) -> None:
    """Brings the data to the hosts and says what was done; what went wrong on some of them is raised at the end.

    ``paths`` are files, folders or prefixes; an experiment's files are brought where one is named, or no path is.
    """
    project = session.cluster.project_folder
    chosen: tuple[Chosen, ...] = choose(project, paths)
    laid_out: tuple[Experiment, Plan] | None = None
    if config or not paths:
        path = Path(config or DEFAULT_CONFIG)
        cluster = session.cluster
        prepared = prepare(path, cluster.slots, assumptions_for(cluster), overrides, force=True)
        experiment, plan = prepared.experiment, prepared.plan
        laid_out = experiment.resolved(plan.data_parallel_size), plan
        chosen += of_experiment(project, path, experiment.data.data_path, data_files(experiment))
    synced = sync(session, tuple({item.name: item for item in chosen}.values()), dry_run=dry_run)
    say(table(synced.rows, dry_run=dry_run))
    if laid_out is not None and not dry_run:
        say(bring_index_maps(synced, *laid_out))
    if failure := synced.failure:
        raise failure


def table(rows: Sequence[Row], *, dry_run: bool) -> Table:
    """A line for each node."""
    sent = "to send" if dry_run else "sent"
    shown = Table("node", sent, "there", "MB", "seconds", "MB free", "")
    for row in rows:
        if row.failed:
            shown.add_row(row.node, *[""] * 5, "failed")
            continue
        free = "" if row.free is None else f"{row.free / 1e6:,.0f}"
        own = [str(row.sent), str(row.there), f"{row.bytes / 1e6:,.1f}", f"{row.seconds:.1f}", free]
        if row.shared_with and not row.sent + row.there:
            own = [""] * 5  # another's row tells
        shown.add_row(row.node, *own, ", ".join(map(_whose, row.shared_with)))
    return shown


def _whose(keeper: str) -> str:
    return "the project's folder" if keeper == OPERATOR else f"shared with {keeper}"
