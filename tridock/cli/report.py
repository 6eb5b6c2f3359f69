"""``tridock report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from tridock.cli.options import Commands, add_command
from tridock.errors import Problem, RequestError


def add(commands: Commands) -> None:
    parser = add_command(commands, "report", _report, "summarize runs: a table, a loss curve, an HTML page")
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help="run folder; several need -o")
    text = "where to write the loss curve (default: loss.png in the run folder)"
    parser.add_argument("--png", type=Path, metavar="FILE", help=text)
    text = "write everything as one HTML page, with its charts as PNG files"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help=text)
    text = "add a log of Megatron to the page; repeatable"
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help=text)


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
