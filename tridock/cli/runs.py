"""``tridock report``, ``reproduce``, ``triage`` and ``replan``: what reads the folder of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.options import Commands, add_command, add_run, add_workspace
from tridock.errors import Problem, RequestError, RunError

if TYPE_CHECKING:
    from tridock.differences import Difference
    from tridock.reproduction.outcome import Outcome


def add(commands: Commands) -> None:
    parser = add_command(commands, "report", _report, "summarize runs: a table, a loss curve, an HTML page")
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help="run folder; several need -o")
    text = "where to write the loss curve (default: loss.png in the run folder)"
    parser.add_argument("--png", type=Path, metavar="FILE", help=text)
    text = "write everything as one HTML page, with its charts as PNG files"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help=text)
    text = "add a log of Megatron to the page; repeatable"
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help=text)

    parser = add_command(commands, "reproduce", _reproduce, "repeat a run and compare the losses")
    add_run(parser)
    add_workspace(parser)
    text = "compare with this existing run instead of repeating RUN"
    parser.add_argument("--against", type=Path, metavar="RUN", help=text)
    text = (
        "allowed loss difference, relative to max(1, abs(loss))"
        " (default: 0 on CPUs; on GPUs 1e-4 in fp32, otherwise 1e-2)"
    )
    parser.add_argument("--tolerance", type=float, help=text)
    parser.add_argument("--force", action="store_true", help="repeat the run even if the data or the GPUs have changed")

    add_run(add_command(commands, "triage", _triage, "explain why a run failed"))

    parser = add_command(commands, "replan", _replan, "show how a run continues after it loses nodes")
    add_run(parser)
    parser.add_argument("--without", action="append", required=True, metavar="NODE", help="lost node; repeatable")
    text = "spare node that may replace a lost one; repeatable"
    parser.add_argument("--spare", action="append", default=[], metavar="NODE", help=text)
    parser.add_argument("--anew", action="store_true", help="start from the beginning, not from a checkpoint")
    parser.add_argument("--json", action="store_true", help="print the new plan and the run's new files as JSON")


def _report(arguments: argparse.Namespace) -> int:
    """Print a table about one run and draw its loss curve, or write one HTML page about several runs and logs."""
    if arguments.output is not None:
        return _page(arguments)
    if arguments.log or len(arguments.run) > 1:
        todo = "name the HTML page: -o report.html"
        raise RequestError(Problem("-o", "is required for several runs, and for logs", "", todo))
    if not arguments.run:
        raise RequestError(Problem("RUN", "is missing", "", "give runs/<run-id>, or a Megatron log with --log"))

    from rich.console import Console

    from tridock.contracts import run_folder
    from tridock.report.charts import plot_loss
    from tridock.report.summary import render_table, summarize

    run = arguments.run[0]
    png = arguments.png or run / run_folder.LOSS_CURVE
    Console().print(render_table(summarize(run)))
    plot_loss(run, png)
    print(f"loss curve  {png}")
    print(f"run folder  {run}")
    return 0


def _page(arguments: argparse.Namespace) -> int:
    from tridock.report.page import write_report

    if arguments.png is not None:
        todo = "leave it out: the page's charts are written beside it as <page>-loss.png and so on"
        raise RequestError(Problem("--png", "does not go with -o", str(arguments.png), todo))
    page, *charts = write_report(arguments.run, arguments.log, arguments.output)
    print(f"page        {page}")
    for chart in charts:
        print(f"chart       {chart}")
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    """Repeat a run from its folder and compare environment and losses with the original. The exit code is 4 if the
    losses differ.
    """
    from rich.console import Console

    from tridock.contracts import run_folder
    from tridock.ops.runs.reproduce import compare_with, reproduce_here
    from tridock.report.run_tables import environment_table, verdict_table

    console = Console(highlight=False)

    def print_environment(differences: Sequence[Difference], notes: Sequence[str]) -> None:
        console.print(environment_table(differences))
        for note in notes:
            print(f"note: {note}")

    run, code = arguments.run, 0
    if arguments.against is not None:
        outcome: Outcome | None = compare_with(run, arguments.against, print_environment, arguments.tolerance)
    else:
        options = {"tolerance": arguments.tolerance, "force": arguments.force}
        outcome, code = reproduce_here(run, arguments.workspace, print_environment, **options)
    if outcome is None:
        return code
    console.print(verdict_table(outcome))
    print(f"written to  {run_folder.REPRODUCTION} in the folder of {outcome.now}")
    return RunError.exit_code if outcome.verdict == "different" else 0


def _triage(arguments: argparse.Namespace) -> int:
    """Explain why a run failed: the rank that failed first, the cause, and the fix."""
    from tridock.ops.runs.local_run import triage_here

    print(triage_here(arguments.run))
    return 0


def _replan(arguments: argparse.Namespace) -> int:
    """Show how a run continues after it loses nodes: on spare nodes, or with fewer replicas. Changes nothing: the
    supervisor of the run does the same when it restarts the run.
    """
    from tridock.ops.runs.replan import replan

    found = replan(arguments.run, arguments.without, arguments.spare, anew=arguments.anew)
    print(found.to_json() if arguments.json else found.summary, end="" if arguments.json else "\n")
    return 0
