"""``tridock report``, ``reproduce``, ``triage`` and ``replan``: what reads runs, here or on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.launch import follow, follow_job, reachable
from tridock.cli.options import (
    Commands,
    add_cluster,
    add_command,
    add_run,
    add_run_folder,
    add_workspace,
    find_hostfile,
    open_session,
    output_file,
    run_of,
)
from tridock.cli.output import print_tables, say
from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError, RunError

if TYPE_CHECKING:
    from tridock.differences import Difference
    from tridock.reproduction.outcome import Outcome


def add(commands: Commands) -> None:
    which = "run id, or run folder (runs/<run-id>)"
    examples: tuple[str, ...] = (
        "runs/demo-3d-20261122-110613-14b7",
        "--hosts hostfile",
        "runs/a runs/b -o both.html",
    )
    parser = add_command(commands, "report", _report, "summarize runs: a table, a loss curve, an HTML page", *examples)
    add_run(parser, which, several=True)
    add_cluster(parser)
    text = "file for the loss curve (default: loss.png in the run folder)"
    parser.add_argument("--png", type=output_file, metavar="FILE", help=text)
    text = (
        "write one HTML page, and its charts as PNG files"
        " (default for runs of a cluster: report.html in the folder of the first)"
    )
    parser.add_argument("-o", "--output", type=output_file, metavar="FILE.html", help=text)
    text = "add a Megatron log to the page; repeatable"
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help=text)

    examples = ("--run runs/demo-3d-20261122-110613-14b7", "--hosts hostfile --run demo-3d-20261122-110613-14b7")
    parser = add_command(commands, "reproduce", _reproduce, "repeat a run and compare the losses", *examples)
    add_run(parser, f"{which}; a folder runs on this machine unless --hosts is given")
    add_cluster(parser)
    add_workspace(parser)
    text = "compare with this existing run instead of repeating RUN"
    parser.add_argument("--against", type=Path, metavar="RUN", help=text)
    text = (
        "allowed loss difference, relative to max(1, abs(loss))"
        " (default: 0 on CPUs; on GPUs 1e-4 in fp32, otherwise 1e-2)"
    )
    parser.add_argument("--tolerance", type=float, help=text)
    parser.add_argument("--force", action="store_true", help="repeat the run even if the data or the GPUs have changed")

    examples = ("--hosts hostfile", "--run runs/demo-3d-20261122-110613-14b7")
    parser = add_command(commands, "triage", _triage, "explain why a run failed", *examples)
    add_run(parser, which, "the last failed run")
    add_cluster(parser)

    example = "runs/demo-3d-20261122-110613-14b7 --without host-b"
    parser = add_command(commands, "replan", _replan, "show how a run continues after it loses nodes", example)
    add_run_folder(parser)
    parser.add_argument("--without", action="append", default=[], metavar="NODE", help="lost node; repeatable")
    text = "spare node that may replace a lost one; repeatable"
    parser.add_argument("--spare", action="append", default=[], metavar="NODE", help=text)
    parser.add_argument("--head", metavar="NODE", help="new head of the run (default: its head)")
    parser.add_argument("--from-scratch", action="store_true", help="start from the beginning, not from a checkpoint")
    parser.add_argument("--json", action="store_true", help="print the new plan and the run's new files as JSON")


def _report(arguments: argparse.Namespace) -> int:
    """Print a table about one run and draw its loss curve, or write one HTML page about several runs and logs. Runs of
    a cluster are fetched first.
    """
    folders, fetched = _folders(arguments)
    if fetched:
        arguments.output = arguments.output or folders[0] / run_folder.REPORT
    if arguments.output is not None:
        return _page(arguments, folders)
    if arguments.log or len(folders) > 1:
        todo = "name the HTML page: -o report.html"
        raise RequestError(Problem("-o", "is required for several runs, and for logs", "", todo))
    if not folders:
        todo = "give runs/<run-id>, a Megatron log with --log, or a cluster with --hosts"
        raise RequestError(Problem("--run", "is missing", "", todo))

    from tridock.report.charts import plot_loss
    from tridock.report.subject import of_run
    from tridock.report.summary import render_table

    run = folders[0]
    png = arguments.png or run / run_folder.LOSS_CURVE
    subject = of_run(run)
    print_tables(render_table(subject.name, subject.rows))
    if subject.summary is not None or len(subject.columns):
        plot_loss(run, png)
        print(f"loss curve  {png}")
    else:
        say("no losses: tridock run --metrics reads them from the program's output")
    print(f"run folder  {run}")
    return 0


def _is_folder(run: str, arguments: argparse.Namespace) -> bool:
    """Whether a run is named by its folder, which is the only way without a cluster."""
    return "/" in run or Path(run).is_dir() or find_hostfile(arguments) is None


def _folders(arguments: argparse.Namespace) -> tuple[list[Path], bool]:
    """Returns the folders of the runs and whether any was fetched. On a cluster the default is the last run."""
    runs: list[str | None] = [*arguments.run]
    if not runs and not arguments.log and find_hostfile(arguments) is not None:
        runs = [None]
    if all(run is not None and _is_folder(run, arguments) for run in runs):
        return [Path(run) for run in arguments.run], False
    session = open_session(arguments)

    from tridock.ops.runs.fetch import fetch
    from tridock.ops.runs.registry import choose_run

    def folder_of(run: str | None) -> Path:
        if run is not None and _is_folder(run, arguments):
            return Path(run)
        return fetch(session, choose_run(session, run, active=False), Path("runs"))

    return [folder_of(run) for run in runs], True


def _page(arguments: argparse.Namespace, folders: Sequence[Path]) -> int:
    from tridock.report.page import write_report

    if arguments.png is not None:
        todo = "leave it out: the page's charts are written beside it as <page>-loss.png and so on"
        raise RequestError(Problem("--png", "does not go with -o", str(arguments.png), todo))
    page, *charts = write_report(folders, arguments.log, arguments.output)
    print(f"page        {page}")
    for chart in charts:
        print(f"chart       {chart}")
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    """Repeat a run from its folder, and compare environment and losses with the original. The exit code is 4 if the
    losses differ.
    """
    from tridock.ops.runs.reproduce import check_tolerance, compare_with, reproduce_here
    from tridock.report.run_tables import verdict_table

    run, code = run_of(arguments), 0
    check_tolerance(arguments.tolerance)
    if arguments.against is not None:
        outcome: Outcome | None = compare_with(
            Path(_named(run)), arguments.against, _print_environment, arguments.tolerance
        )
    elif run is not None and arguments.hosts is None and _is_slurms_program(Path(run)):
        outcome, code = _reproduce_under_slurm(arguments, Path(run))
    elif run is not None and _is_folder(run, arguments) and arguments.hosts is None:
        options = {"tolerance": arguments.tolerance, "force": arguments.force}
        outcome, code = reproduce_here(Path(run), arguments.workspace, _print_environment, **options)
    else:
        outcome, code = _reproduce_on_cluster(arguments, run)
    if outcome is None:
        return code
    print_tables(verdict_table(outcome))
    print(f"written to  {run_folder.REPRODUCTION} in the folder of {outcome.now}")
    return RunError.exit_code if outcome.verdict == "different" else 0


def _named(run: str | None) -> str:
    if run is None:
        raise RequestError(Problem("--run", "is missing", "", "give the folder of the first run: runs/<run-id>"))
    return run


def _reproduce_on_cluster(arguments: argparse.Namespace, run: str | None) -> tuple[Outcome | None, int]:
    from tridock.ops.runs import registry, reproduce_remote

    session = open_session(arguments)
    home = Path("runs") if run is None or "/" not in run else Path(run).parent
    original = reproduce_remote.original_of(session, None if run is None else Path(run).name, home)
    bundle, gate = reproduce_remote.start(session, original, _print_environment, force=arguments.force)
    again = registry.Run(bundle.run_id, session.head)
    say(f"run {bundle.run_id}: repeats {original.name}")
    if code := follow(arguments, session, again):
        return None, code
    if not gate.original.metrics[0]:
        say("its losses are not compared: the original has none (docs/guides/any-script.md, Losses)")
        return None, 0
    return reproduce_remote.finish(session, again, gate, home, arguments.tolerance), 0


def _is_slurms_program(run: Path) -> bool:
    from tridock.experiment import is_command

    return (run / run_folder.JOB).is_file() and is_command(run / run_folder.EXPERIMENT)


def _reproduce_under_slurm(arguments: argparse.Namespace, run: Path) -> tuple[Outcome | None, int]:
    from tridock.ops.runs.reproduce import compare_with
    from tridock.ops.slurm.submit import again, submit
    from tridock.reproduction.original import read_original

    original = read_original(run, losses=False)
    options = again(run)
    job = submit(options, say)
    (folder,) = job.folders
    say(f"job {job.job_id}\nrun {folder.name}: repeats {run.name}; folder {folder}")
    if code := follow_job(options.workspace, job):
        return None, code
    if not original.metrics[0]:
        say("its losses are not compared: the original has none (docs/guides/any-script.md, Losses)")
        return None, 0
    return compare_with(run, folder, _print_environment, arguments.tolerance), 0


def _print_environment(differences: Sequence[Difference], notes: Sequence[str]) -> None:
    from tridock.report.run_tables import environment_table

    print_tables(environment_table(differences))
    for note in notes:
        say(f"note: {note}")


def _triage(arguments: argparse.Namespace) -> int:
    """Explain why a run failed: the rank that failed first, the cause, and the fix."""
    run = run_of(arguments)
    if run is not None and _is_folder(run, arguments):
        from tridock.ops.runs.local_run import triage_here

        print(triage_here(Path(run)))
        return 0
    from tridock.ops.runs.triage import triage

    # The unreachable host may be the cause: the others have evidence.
    say(str(triage(reachable(open_session(arguments))[0], run)))
    return 0


def _replan(arguments: argparse.Namespace) -> int:
    """Show how a run continues after it loses nodes: on spare nodes, or with fewer replicas. Changes nothing: the
    supervisor of the run does the same when it restarts the run.
    """
    from tridock.ops.runs.replan import replan

    if not arguments.without and arguments.head is None:
        raise RequestError(Problem("--without", "is missing", "", "name the node that the run has lost"))
    found = replan(
        arguments.run, arguments.without, arguments.spare, from_scratch=arguments.from_scratch, head=arguments.head
    )
    print(found.to_json() if arguments.json else found.summary, end="" if arguments.json else "\n")
    return 0
