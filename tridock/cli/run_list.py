"""``tridock runs``: lists runs of a cluster, of this machine and of its Slurm jobs, and removes those that are over."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from tridock.cli.options import Arguments, Commands, Parser, add_command, says_yes
from tridock.cli.output import print_json, print_tables, problem_documents, report_failure, say
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, Problem, RequestError, TridockError, count, printable

if TYPE_CHECKING:
    from tridock.contracts.node_answers import RunInfo
    from tridock.ops.runs.removal import Remove


def add(commands: Commands) -> None:
    examples: tuple[str, ...] = ("", "--hosts hostfile --sizes", "--here --json")
    parser = add_command(commands, "runs", _runs, "list all runs, newest first", *examples)
    _add_place(parser)
    parser.add_flag(
        "--sizes", "show what each run's folder takes on the disks of its nodes; train.checkpoint_folder is not counted"
    )
    parser.add_flag("--json", "print the runs as JSON")
    verbs = parser.add_subparsers(metavar="COMMAND", help="rm or prune, each with options of its own")

    remove = add_command(verbs, "rm", _remove, "remove runs", "--hosts hostfile demo-3d-20261122-110613-14b7")
    remove.add_argument("runs", nargs="+", metavar="RUN", help="run id; may be several")
    examples = ("--hosts hostfile --older-than 14", "--here --keep 20", "--hosts hostfile --state failed --dry-run")
    prune = add_command(verbs, "prune", _prune, "remove runs by age, number and state", *examples)
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="only runs that began before that")
    prune.add_argument("--keep", type=int, metavar="N", help="not the newest N runs")
    states = [state.value for state in RunState if not state.is_active]
    text = "only runs in this state; repeatable (default: all that are over)"
    prune.add_argument("--state", action="append", default=[], choices=states, metavar="STATE", help=text)
    prune.add_flag("--dry-run", "print the runs; remove nothing")
    for verb in (remove, prune):
        _add_place(verb)
        verb.add_flag("--yes", "do not ask")
        verb.add_flag("--force", "of a cluster, also runs that somebody else has started")
        verb.add_flag("--json", "print the runs that are removed as JSON; needs --yes or --dry-run")
        for action in verb._actions:
            if action.dest in ("hosts", "include", "exclude", "here", "workspace", "json"):  # also before the verb
                action.default = argparse.SUPPRESS


def _add_place(parser: Parser) -> None:
    parser.add_cluster()
    parser.add_flag("--here", "use this machine, with its Slurm jobs, not a cluster")
    parser.add_workspace()


def _is_here(arguments: Arguments) -> bool:
    if arguments.here and arguments.hosts is not None:
        raise RequestError(Problem("--here", "does not go with --hosts", arguments.hosts, "give one of them"))
    return bool(arguments.here)


def _runs(arguments: Arguments) -> int:
    """List all runs with their state, newest first: of the cluster, if there is one, of this machine and of its Slurm
    jobs."""
    from tridock.contracts.node_answers import RunInfo
    from tridock.ops.hosts.client import reachable
    from tridock.ops.runs.cluster_runs import list_runs
    from tridock.ops.runs.removal import runs_here
    from tridock.ops.slurm.jobs import submitted
    from tridock.report.run_tables import history_table

    failure, on_cluster = None, list[RunInfo]()
    if not _is_here(arguments) and arguments.found_hostfile is not None:
        client, failure = reachable(arguments.open_hosts())
        try:
            on_cluster = list_runs(client, sizes=arguments.sizes) if client.hosts else []
        except ClusterError as error:
            failure = failure or error
    here = runs_here(arguments.workspace, sizes=arguments.sizes)
    jobs = {run.folder.name: run.job_id for run in submitted(arguments.workspace)}
    where: dict[str, dict[str, str]] = {run.run_id: {"cluster": run.head} for run in on_cluster}
    for run in here:
        job = jobs.get(run.run_id)
        where.setdefault(run.run_id, {}).update({"slurm": f"job {job}"} if job else {"here": "this machine"})
    # Of a run that was fetched, the cluster knows more than the copy.
    known = {run.run_id: run for run in (*here, *on_cluster)}
    listed = sorted(known.values(), key=lambda run: (run.created, run.run_id), reverse=True)
    if arguments.json:
        rows = [{**asdict(run), "job": jobs.get(run.run_id), "where": [*where[run.run_id]]} for run in listed]
        print_json(runs=rows, problems=problem_documents(failure))
    else:
        print_tables(history_table(listed, {name: ", ".join(it.values()) for name, it in where.items()}))
    return report_failure(failure)


def _remove(arguments: Arguments) -> int:
    """Remove runs that are over, with their checkpoints, from all nodes that are up, or from this machine."""
    from tridock.ops.runs.cluster_runs import refuse_others
    from tridock.ops.runs.removal import named

    runs, remove = _opened(arguments)
    found = named(runs, arguments.runs)
    if not (arguments.force or arguments.here):
        refuse_others(found)
    return _remove_asked(arguments, found, remove)


def _prune(arguments: Arguments) -> int:
    """Remove the runs that are over and meet all conditions, with their checkpoints. A running run, and one whose
    checkpoint a running run began from, stay."""
    from tridock.ops.runs.cluster_runs import others
    from tridock.ops.runs.removal import prunable

    if arguments.older_than is None and arguments.keep is None and not arguments.state:
        todo = "give --older-than, --keep or --state; --keep 0 takes all that are over"
        raise RequestError(Problem("runs prune", "has no condition", "", todo))
    for option, value in {"--older-than": arguments.older_than, "--keep": arguments.keep}.items():
        if value is not None and not value >= 0:
            raise RequestError(Problem(option, "must not be negative", str(value), "give 0 or more"))
    runs, remove = _opened(arguments)
    limits = {"days": arguments.older_than, "keep": arguments.keep, "states": [*map(RunState, arguments.state)]}
    found = prunable(runs, datetime.now(UTC), **limits)
    if theirs := [] if arguments.force or arguments.here else others(found):
        by = ", ".join(sorted({run.started_by for run in theirs}))
        note = printable(f"kept {count(len(theirs), 'run')} of others ({by}): --force removes them too")
        print(note, file=sys.stderr) if arguments.json else say(note)
        found = [run for run in found if run not in theirs]
    return _remove_asked(arguments, found, remove)


def _opened(arguments: Arguments) -> tuple[Sequence[RunInfo], Remove]:
    """Returns the runs, with their sizes, and what removes some."""
    from dataclasses import replace

    from tridock.ops.runs.cluster_runs import list_runs
    from tridock.ops.runs.removal import remove_here, remove_on_cluster, runs_here
    from tridock.ops.slurm.jobs import in_queue

    if _is_here(arguments):
        queued = in_queue(arguments.workspace)
        runs = runs_here(arguments.workspace, sizes=True)
        runs = [replace(run, has_processes=run.has_processes or run.run_id in queued) for run in runs]
        return runs, partial(remove_here, arguments.workspace)
    client = arguments.open_client()
    if down := [node for node in client.hosts if node not in client.running()]:
        print(f"not up, so what is there stays: {', '.join(down)}", file=sys.stderr)
    return list_runs(client, sizes=True), partial(remove_on_cluster, client)


def _remove_asked(arguments: Arguments, runs: Sequence[RunInfo], remove: Remove) -> int:
    from tridock.ops.runs.removal import refuse_kept
    from tridock.report.markup import gib
    from tridock.report.run_tables import history_table

    is_dry, size = getattr(arguments, "dry_run", False), sum(run.disk_bytes or 0 for run in runs)
    what = f"{count(len(runs), 'run')}, {gib(size)}"
    if arguments.json:
        if runs and not (arguments.yes or is_dry):
            raise RequestError(Problem("--yes", "is missing, and --json asks nobody", what, "give it, or --dry-run"))
        removed: list[str] | None = [run.run_id for run in runs]
        failure: TridockError | None = None
        try:
            kept = remove(runs) if runs and not is_dry else ()
            removed = [run.run_id for run in runs if run.run_id not in kept]
            refuse_kept(kept)
        except RequestError as error:
            failure = error
        except ClusterError as error:  # some may be gone
            removed, failure = None, error
        print_json(removed=removed, dry_run=is_dry, problems=problem_documents(failure))
        return report_failure(failure)
    if not runs:
        say("no run to remove")
        return 0
    print_tables(history_table(runs))
    if is_dry:
        say(f"would remove {what}")
        return 0
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise RequestError(Problem("--yes", "is missing, and nobody can be asked", what, "give it to remove them"))
        if not says_yes(f"remove {what}?"):
            raise RequestError(Problem("runs", "are not removed", "no yes", "answer y, or give --yes"))
    kept = remove(runs)
    say(f"removed {count(len(runs) - len(kept), 'run')}")
    refuse_kept(kept)
    return 0
