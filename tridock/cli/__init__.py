"""``tridock``: everything that needs no remote host. Each subcommand imports its room when it runs."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tridock import __version__
from tridock.cli.data import add_data_commands
from tridock.cli.slurm import add_slurm_commands
from tridock.errors import EXIT_INTERRUPTED, Problem, RequestError, RunError, TridockError

if TYPE_CHECKING:
    from tridock.differences import Difference
    from tridock.reproduction import Outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code (0, 2, 3, 4, 130 as in docs/architecture.md)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # into `| tee log` too, a line comes when it is printed
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
    train.add_argument("--force", action="store_true", help="even if the plan says that it does not fit the GPUs")
    train.add_argument("--run-id-file", type=Path, help="write the run's id into this file")
    several = train.add_argument_group("several machines, each started by hand (fab launch starts them all)")
    several.add_argument("--nnodes", type=int, default=1, help="machines of the run (default: 1)")
    several.add_argument("--node-rank", type=int, default=0, help="which one this is, from 0 (default: 0)")
    several.add_argument("--master-addr", help="where the others reach the one of rank 0; port: launch.master_port")
    train.set_defaults(action=_train)

    plan = commands.add_parser(
        "plan", help="know before launching: what an experiment becomes on a cluster, or why not"
    )
    _plan_options(plan)
    plan.set_defaults(action=_plan)

    data = commands.add_parser("data", help="make training data, look after it, bring it to the hosts")
    subcommands = data.add_subparsers(required=True, metavar="COMMAND")
    add_data_commands(subcommands)
    sync = subcommands.add_parser("sync", help="bring data to every host that lacks it, by hash (as fab data)")
    _sync_options(sync)
    sync.set_defaults(action=_data_sync)

    slurm = commands.add_parser("slurm", help="the same experiment on a cluster with Slurm")
    add_slurm_commands(slurm.add_subparsers(required=True, metavar="COMMAND"))

    report = commands.add_parser("report", help="a run's summary and loss curve; a page of one or more runs and logs")
    report.add_argument("run", type=Path, nargs="*", help="the run's folder; of several one page is made")
    report.add_argument("--png", type=Path, help="where the curve goes (default: loss.png in the run's folder)")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE.html", help="write all there is to see as one page, and its charts"
    )
    report.add_argument("--log", type=Path, action="append", default=[], help="a Megatron log, beside or without runs")
    report.set_defaults(action=_report)

    bench = commands.add_parser("bench", help="measure a matrix of experiments on this machine, beside bare PyTorch")
    bench.add_argument("config", type=Path, help="the benchmark's YAML file: configs/bench/small.yaml")
    bench.add_argument("-o", "--out", type=Path, help="folder of the results (default: runs/bench-<name>)")
    bench.add_argument("--world", type=int, nargs="+", metavar="N", help="ranks, in place of the file's world")
    bench.add_argument("--gpu", help="this machine's GPU, for the plan: h200, a100-80gb, … or its memory (24gib)")
    bench.set_defaults(action=_bench)

    reproduce = commands.add_parser("reproduce", help="do a run once more from its folder, and compare the losses")
    reproduce.add_argument("run", type=Path, help="the run's folder")
    reproduce.add_argument(
        "--workspace", type=Path, default=Path(), help="folder that holds data/ and runs/ (default: here)"
    )
    reproduce.add_argument("--against", type=Path, help="start nothing: compare with this run, which there is already")
    reproduce.add_argument(
        "--tolerance",
        type=float,
        help="largest difference of a loss, times the larger of 1 and it"
        " (default: 0 on CPUs; on GPUs 1e-4 in fp32, else 1e-2)",
    )
    reproduce.add_argument("--force", action="store_true", help="even if the data or the GPUs are not those of the run")
    reproduce.set_defaults(action=_reproduce)

    triage = commands.add_parser("triage", help="why a run failed: who first, the cause, what to do")
    triage.add_argument("run", type=Path, help="the run's folder")
    triage.set_defaults(action=_triage)

    replan = commands.add_parser("replan", help="how a run that has lost nodes would go on: on spares, or on fewer")
    replan.add_argument("run", type=Path, help="the run's folder")
    replan.add_argument("--without", action="append", required=True, metavar="NODE", help="a node that is lost")
    replan.add_argument("--spare", action="append", default=[], metavar="NODE", help="a spare that may be used")
    replan.add_argument("--anew", action="store_true", help="from the beginning: there is no checkpoint")
    replan.add_argument("--json", action="store_true", help="print all of it for programs, the run's new files too")
    replan.set_defaults(action=_replan)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from tridock.ops.runs.local_run import Place, run_here

    place = Place(arguments.nnodes, arguments.node_rank, arguments.master_addr)
    return run_here(
        arguments.config,
        arguments.nproc,
        arguments.workspace,
        arguments.set,
        arguments.run_id_file,
        place,
        force=arguments.force,
    ).exit_code


def _replan(arguments: argparse.Namespace) -> int:
    from tridock.ops.runs.replan import replan

    found = replan(arguments.run, arguments.without, arguments.spare, anew=arguments.anew)
    print(found.to_json() if arguments.json else found.words, end="" if arguments.json else "\n")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tridock.bench.cells import exit_code_of
    from tridock.bench.output import record, table
    from tridock.bench.run import run_bench
    from tridock.bench.schema import load_bench
    from tridock.gpus import find_gpu

    bench = load_bench(arguments.config, arguments.world)
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu, "--gpu")
    out = arguments.out or Path("runs", f"bench-{arguments.config.stem}")
    measured = []
    # As with Ctrl-C: the run of the moment is stopped.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for cell in run_bench(bench, arguments.config.parent, gpu, print):
            measured.append(cell)
            # After each: what was measured stays, whatever comes.
            record(measured, bench, out)
    except KeyboardInterrupt:
        what = f"{len(measured)} cells are in {out}" if measured else "nothing was measured"
        print(f"stopped, and the run of the moment with it; {what}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table(measured))
    print(f"results: {out}/results.json, results.md and plots")
    return exit_code_of(measured)


def _reproduce(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tridock.contracts import run_folder
    from tridock.ops.runs.reproduce import compare_with, reproduce_here
    from tridock.report.reproduction_tables import environment_table, verdict_table

    console = Console(highlight=False)

    def tell(found: Sequence[Difference], notes: Sequence[str]) -> None:
        console.print(environment_table(found))
        for note in notes:
            print(f"note: {note}")

    run, code = arguments.run, 0
    if arguments.against is not None:
        outcome: Outcome | None = compare_with(run, arguments.against, tell, arguments.tolerance)
    else:
        options = {"tolerance": arguments.tolerance, "force": arguments.force}
        outcome, code = reproduce_here(run, arguments.workspace, tell, **options)
    if outcome is None:
        return code
    console.print(verdict_table(outcome))
    print(f"written to  {run_folder.REPRODUCTION} in the folder of {outcome.now}")
    return RunError.exit_code if outcome.verdict == "different" else 0


def _triage(arguments: argparse.Namespace) -> int:
    from tridock.ops.runs.local_run import triage_here

    print(triage_here(arguments.run))
    return 0


def _plan_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("config", type=Path, nargs="?", help="the experiment's YAML file")
    cluster = plan.add_argument_group("the cluster")
    cluster.add_argument("--hosts", type=Path, help="a DeepSpeed hostfile, with its settings in a .yaml file beside it")
    cluster.add_argument("--include", default="", help="only these nodes and slots: host-a@host-b:0,2")
    cluster.add_argument("--exclude", default="", help="all but these nodes and slots")
    cluster.add_argument("--nodes", type=int, help="without a hostfile: so many nodes")
    cluster.add_argument("--gpus-per-node", type=int, default=8, help="without a hostfile: slots of each (default: 8)")
    cluster.add_argument("--gpu", help="the nodes' GPU (v100-16gb, a100-80gb, h200, …) or its memory (24gib)")
    cluster.add_argument(
        "--network-gbit", type=float, help="between nodes, of one node (default: the settings', or 100)"
    )
    plan.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field: train.seed=7")
    plan.add_argument("--tflops", type=float, help="what a GPU computes in a second (default: half of its peak)")
    plan.add_argument("--tokens", type=float, help="reckon the time to so many tokens: 300e9 (default: the run's own)")
    plan.add_argument(
        "--search", action="store_true", help="list the layouts that fit, best first, and why others do not"
    )
    plan.add_argument("--json", action="store_true", help="print all of it for programs")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="also draw the rank map: a .png or .svg file")
    plan.add_argument("--explain", metavar="FIELD", help="say what a field is, and what it does to the plan")


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.explain is not None:
        from tridock.plan.explain import explain

        print(explain(arguments.explain))
        return 0
    if arguments.config is None:
        raise RequestError(Problem("CONFIG", "is missing", "", "give the experiment's YAML file"))

    from rich.console import Console

    from tridock.ops.runs.planning_assumptions import slots_of, told
    from tridock.report.plan_output import Show, print_plan

    cluster, slots = slots_of(
        arguments.hosts, arguments.include, arguments.exclude, arguments.nodes, arguments.gpus_per_node
    )
    known = told(cluster, arguments.gpu, arguments.network_gbit, arguments.tflops, arguments.tokens)
    show = Show(arguments.search, arguments.json, str(arguments.plot or ""))
    return print_plan(arguments.config, arguments.set, slots, known, Console(highlight=False), show)


def _sync_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=Path, required=True, help="a DeepSpeed hostfile, with its settings beside it")
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        help="a data set's prefix, a file or a folder below the project's (default: what the experiment reads)",
    )
    parser.add_argument("--config", default="", help="the experiment's YAML file (default: as fab launch)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of it")
    parser.add_argument("--include", default="", help="only these nodes and slots: host-a@host-b:0,2")
    parser.add_argument("--exclude", default="", help="all but these nodes and slots")
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")


def _data_sync(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    try:
        from tridock.ops.hosts.session import Session
        from tridock.ops.sync.command import run
    except ModuleNotFoundError as missing:
        todo = "run it where fab runs (make venv); a node has no ssh to the hosts"
        raise RequestError(Problem("tridock data sync", "needs the operator's packages", str(missing), todo)) from None
    session = Session.open(arguments.hosts, arguments.include, arguments.exclude)
    say = Console(highlight=False, soft_wrap=True).print
    run(session, arguments.path, arguments.config, arguments.set, say, dry_run=arguments.dry_run)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        return _report_page(arguments)
    if arguments.log or len(arguments.run) > 1:
        todo = "name the page: -o report.html"
        raise RequestError(Problem("-o", "is missing: several runs and logs make a page", "", todo))
    if not arguments.run:
        raise RequestError(Problem("RUN", "is missing", "", "give runs/<run-id>, or a Megatron log with --log"))

    from rich.console import Console

    from tridock.contracts import run_folder
    from tridock.report.curve import plot_loss
    from tridock.report.summary import render_table, summarize

    run = arguments.run[0]
    png = arguments.png or run / run_folder.LOSS_CURVE
    Console().print(render_table(summarize(run)))
    plot_loss(run, png)
    print(f"loss curve  {png}")
    print(f"run folder  {run}")
    return 0


def _report_page(arguments: argparse.Namespace) -> int:
    from tridock.report.write import write_report

    if arguments.png is not None:
        todo = "leave it out: the page's charts lie beside it, as <page>-loss.png and so on"
        raise RequestError(Problem("--png", "is not for a page", str(arguments.png), todo))
    page, *charts = write_report(arguments.run, arguments.log, arguments.output)
    print(f"page        {page}")
    for chart in charts:
        print(f"chart       {chart}")
    return 0
