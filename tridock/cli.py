"""``tridock``: everything that needs no remote host. Each subcommand imports its room when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tridock import __version__
from tridock.errors import EXIT_INTERRUPTED, TridockError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code (0, 2, 3, 4, 130 as in docs/architecture.md)."""
    arguments = _parser().parse_args(argv)
    action: Callable[[argparse.Namespace], int] = arguments.action
    try:
        return action(arguments)
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tridock", description=__doc__.splitlines()[0].replace("``", ""))
    parser.add_argument("--version", action="version", version=f"tridock {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run an experiment on this machine or in this container")
    train.add_argument("config", type=Path, help="the experiment's YAML file")
    train.add_argument("--nproc", type=int, help="ranks to start (default: one a GPU, or 2 without GPUs)")
    train.add_argument(
        "--workspace", type=Path, default=Path(), help="folder that holds data/ and runs/ (default: here)"
    )
    train.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field: train.seed=7")
    train.add_argument("--run-id-file", type=Path, help="write the run's id into this file")
    several = train.add_argument_group("several machines, each started by hand (fab launch starts them all)")
    several.add_argument("--nnodes", type=int, default=1, help="machines of the run (default: 1)")
    several.add_argument("--node-rank", type=int, default=0, help="which one this is, from 0 (default: 0)")
    several.add_argument("--master-addr", help="where the others reach the one of rank 0; port: launch.master_port")
    train.set_defaults(action=_train)

    plan = commands.add_parser("plan", help="show what an experiment becomes on a cluster")
    plan.add_argument("config", type=Path, help="the experiment's YAML file")
    plan.add_argument("--hosts", type=Path, required=True, help="a DeepSpeed hostfile")
    plan.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field: train.seed=7")
    plan.set_defaults(action=_plan)

    data = commands.add_parser("data", help="make training data").add_subparsers(required=True, metavar="COMMAND")
    demo = data.add_parser("demo", help="the Python standard library's sources as a small data set")
    demo.add_argument("--folder", type=Path, default=Path("data/demo"), help="where it goes (default: data/demo)")
    demo.set_defaults(action=_data_demo)

    report = commands.add_parser("report", help="the summary and the loss curve of a run")
    report.add_argument("run", type=Path, help="the run's folder")
    report.add_argument("--png", type=Path, help="where the curve goes (default: loss.png in the run's folder)")
    report.set_defaults(action=_report)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from tridock.ops.local_run import Place, run_here

    place = Place(arguments.nnodes, arguments.node_rank, arguments.master_addr)
    return run_here(arguments.config, arguments.nproc, arguments.workspace, arguments.set, arguments.run_id_file, place)


def _plan(arguments: argparse.Namespace) -> int:
    from tridock.cluster import load_cluster
    from tridock.experiment import load_experiment
    from tridock.plan import make_plan

    experiment = load_experiment(arguments.config, arguments.set)
    plan = make_plan(experiment, load_cluster(arguments.hosts).slots, str(arguments.config))
    print(plan.to_json(), end="")
    return 0


def _data_demo(arguments: argparse.Namespace) -> int:
    from tridock.data.corpus import prepare_demo

    prepare_demo(arguments.folder)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tridock import run_folder
    from tridock.report.curve import plot_loss
    from tridock.report.summary import render_table, summarize

    png = arguments.png or arguments.run / run_folder.LOSS_CURVE
    Console().print(render_table(summarize(arguments.run)))
    plot_loss(arguments.run, png)
    print(f"loss curve  {png}")
    print(f"run folder  {arguments.run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
