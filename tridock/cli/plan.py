"""``tridock plan``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tridock.cli.options import (
    Commands,
    add_command,
    add_config,
    add_hosts,
    add_quiet,
    add_set,
    add_slots,
    config_of,
    find_hostfile,
    output_file,
)
from tridock.cli.output import console, print_problems
from tridock.contracts.run_folder import EXPERIMENT
from tridock.errors import Problem, RequestError, count

if TYPE_CHECKING:
    from tridock.cluster.settings import Cluster
    from tridock.experiment.command import CommandExperiment
    from tridock.plan import Assumptions
    from tridock.plan.correction import MeasuredRun


_GPUS_PER_NODE: Final = 8
_ATTENTION: Final = ("fused", "flash-2", "flash-triton", "flash-1", "unfused")


def add(commands: Commands) -> None:
    examples = (
        "--hosts hostfile --config configs/demo-3d.yaml",
        "--config configs/jean-zay/7.5b.yaml --nodes 4 --gpus-per-node 4 --gpu v100-32gb --search",
        "--from-run runs/demo-3d-20261122-110613-14b7",
        "--config configs/jean-zay/7.5b.yaml --nodes 4 --gpus-per-node 4 --gpu v100-32gb --why 'TP4 PP4' 'TP2 PP4'",
        "--explain parallel.tensor_model_parallel_size",
    )
    parser = add_command(commands, "plan", _plan, "check an experiment against a cluster", *examples)
    add_config(parser, "as for tridock launch")
    cluster = parser.add_argument_group("cluster", "A hostfile, or a number of identical nodes.")
    add_hosts(cluster)
    add_slots(cluster)
    text = "contact no host, not even to detect its GPU (done if neither --gpu nor the settings name one)"
    cluster.add_argument("--offline", action="store_true", help=text)
    cluster.add_argument("--nodes", type=int, metavar="N", help="number of nodes, without a hostfile")
    text = f"slots per node, without a hostfile (default: {_GPUS_PER_NODE})"
    cluster.add_argument("--gpus-per-node", type=int, metavar="N", help=text)
    cluster.add_argument("--gpu", help="GPU of the nodes (v100-16gb, a100-80gb, h200, …), or its memory (24gib)")
    text = "network bandwidth of a node (default: from the cluster's settings, or that of a DGX with this GPU)"
    cluster.add_argument("--network-gbit", type=float, metavar="GBIT_PER_S", help=text)
    add_set(parser)
    text = "GPU throughput for the time estimate (default: estimated from the shapes of the matrix products)"
    parser.add_argument("--tflops", type=float, metavar="TFLOP_PER_S", help=text)
    text = (
        "attention of the program, in the estimates (default: fused, today's fastest kernel); flash-2 is"
        " FlashAttention-2, flash-triton and flash-1 the first one in Triton and in CUDA; unfused stores the scores,"
        " as Megatron did until 2023"
    )
    parser.add_argument("--attention", choices=_ATTENTION, default="fused", help=text)
    text = "assume that no communication overlaps with computation, whatever the engine does"
    parser.add_argument("--no-overlap", action="store_true", help=text)
    text = "output of tridock calibrate (default: <hostfile>.calibration.json, if it exists)"
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=text)
    text = "estimate the time to train N tokens, e.g. 300e9 (default: the tokens of the run)"
    parser.add_argument("--tokens", type=float, metavar="N", help=text)
    text = "price of a GPU hour, to estimate the cost of these tokens"
    parser.add_argument("--cost-per-gpu-hour", type=float, metavar="AMOUNT", help=text)
    text = "mean time between failures of a node, to estimate goodput (Llama 3: 6300)"
    parser.add_argument("--node-mtbf", type=float, metavar="HOURS", help=text)
    text = "total write bandwidth of the checkpoint storage, to estimate goodput"
    parser.add_argument("--checkpoint-gb-s", type=float, metavar="GB_PER_S", help=text)
    text = "time from a failure to the next step, excluding loading the checkpoint (default: 51, measured on CPUs)"
    parser.add_argument("--restart-time", type=float, metavar="SECONDS", help=text)
    text = (
        "correct the plan with this run's step time and peak memory; experiment, nodes and GPU are the run's"
        " unless you give others"
    )
    parser.add_argument("--from-run", type=Path, metavar="RUN", help=text)
    text = "list the layouts that fit, best first, and why the others do not"
    parser.add_argument("--search", action="store_true", help=text)
    text = (
        "explain the layout: its time and memory term by term, and why each neighboring layout is better, worse or"
        " refused; with one or two LAYOUTs ('TP4 PP2 MB2', or FIELD=VALUE), compare them term by term"
    )
    parser.add_argument("--why", nargs="*", metavar="LAYOUT", help=text)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="also draw the rank map, or with --search memory against time, into a .png or .svg file",
    )
    text = "explain a field of the experiment and its effect on the plan"
    parser.add_argument("--explain", metavar="FIELD", help=text)
    add_quiet(parser)


def _plan(arguments: argparse.Namespace) -> int:
    """Check an experiment against a cluster before you launch it: print the rank map, the batch sizes, and the
    memory and time that it needs, or why it cannot run.
    """
    if arguments.explain is not None:
        from tridock.plan.explain import explain

        explained = explain(arguments.explain)
        print(json.dumps({"explanation": explained, "problems": []}, indent=2) if arguments.json else explained)
        return 0
    try:
        return _planned(arguments)
    except RequestError as error:
        if not arguments.json:
            raise
        print_problems([problem.document for problem in error.problems], **_NO_PLAN)
        return error.exit_code


_NO_PLAN: Final[Mapping[str, Any]] = {
    "verdict": "illegal",
    "warnings": [],
    "notes": [],
    "ranks": [],
    "groups": {},
    "memory": {"gpu": None, "limit_gib": None, "stages": []},
    "cost": None,
}
"""The fields of the JSON document if there is no plan."""


def _planned(arguments: argparse.Namespace) -> int:
    from tridock.experiment import is_command, load_command
    from tridock.ops.calibrate import beside, read_calibration
    from tridock.ops.runs.default_experiment import choose_experiment
    from tridock.ops.runs.prepare import assumptions_for, failures_for, slots_of
    from tridock.report.measured_run import read_measured_run
    from tridock.report.plan_output import Show, print_plan

    _refuse_unused(arguments)
    run = None if arguments.from_run is None else read_measured_run(arguments.from_run)
    config, cluster = config_of(arguments), None
    if run is not None and arguments.nodes is None and arguments.hosts is None:
        slots = run.slots
    else:
        hosts = arguments.hosts if arguments.nodes is not None else find_hostfile(arguments)
        per_node = _GPUS_PER_NODE if arguments.gpus_per_node is None else arguments.gpus_per_node
        cluster, slots = slots_of(hosts, arguments.include, arguments.exclude, arguments.nodes, per_node)
    if run is not None and config is None:
        config = arguments.from_run / EXPERIMENT
    if config is not None and is_command(config):
        return _print_program(arguments, load_command(config, arguments.set), slots, str(config))
    config, overrides, _ = choose_experiment(config, arguments.set, slots)
    assumptions = assumptions_for(
        cluster,
        arguments.gpu,
        arguments.network_gbit,
        arguments.tflops,
        arguments.tokens,
        arguments.cost_per_gpu_hour,
    )
    failures = failures_for(arguments.node_mtbf, arguments.checkpoint_gb_s, arguments.restart_time)
    assumptions = replace(
        assumptions, attention=arguments.attention, overlaps=not arguments.no_overlap, failures=failures
    )
    own = None if cluster is None else beside(cluster.hostfile_path)
    calibration = arguments.calibration or (own if own is not None and own.exists() else None)
    if calibration is not None:
        read = read_calibration(calibration)
        assumptions = replace(assumptions, calibration=read, calibration_source=str(calibration))
    if cluster is not None and assumptions.gpu is None and not arguments.offline:
        assumptions = _with_hosts_gpu(assumptions, cluster)
    if run is not None:
        assumptions = _corrected(assumptions, run)
    if arguments.why is not None:
        if len(arguments.why) > 2:
            raise RequestError(Problem("--why", "takes at most two layouts", str(len(arguments.why)), "leave some out"))
        from tridock.report.why_output import print_why

        return print_why(config, overrides, slots, assumptions, console(), arguments.why, arguments.json)
    show = Show(arguments.search, arguments.json, str(arguments.plot or ""), arguments.quiet)
    return print_plan(config, overrides, slots, assumptions, console(), show)


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Raises :class:`RequestError` for options without effect beside the others."""
    problems = []
    if arguments.gpus_per_node is not None and arguments.nodes is None:
        got, todo = str(arguments.gpus_per_node), "give --nodes too, or leave it out"
        problems.append(Problem("--gpus-per-node", "is the number of slots of --nodes", got, todo))
    without_why = {
        "--search": arguments.search or None, "--plot": arguments.plot, "--tokens": arguments.tokens,
        "--cost-per-gpu-hour": arguments.cost_per_gpu_hour, "--node-mtbf": arguments.node_mtbf,
    }  # fmt: skip
    for option, value in without_why.items():
        if arguments.why is not None and value is not None:
            problems.append(Problem(option, "has no effect with --why", "", "leave one of the two out"))
    if arguments.nodes is not None or (arguments.from_run is not None and arguments.hosts is None):
        for option, text in (("--include", arguments.include), ("--exclude", arguments.exclude)):
            if text:
                todo = "give --hosts instead of --nodes, or leave it out"
                problems.append(Problem(option, "selects nodes of a hostfile", text, todo))
    if problems:
        raise RequestError(problems)


def _print_program(
    arguments: argparse.Namespace, program: CommandExperiment, slots: Mapping[str, Sequence[int]], source: str
) -> int:
    """Prints your own program on its slots; its memory and time are unknown."""
    from tridock.contracts.run_folder import PLAN, new_run_id
    from tridock.launchers.bundle import default_port
    from tridock.launchers.command import CommandRun, make_command_bundle

    of_model = {"--search": arguments.search, "--why": arguments.why is not None, "--plot": arguments.plot is not None}
    if given := [option for option, value in of_model.items() if value]:
        what, todo = "is your own program, without a model", "leave them out: they are about a model"
        raise RequestError(Problem(source, what, ", ".join(given), todo))
    run_id = new_run_id(program.name)
    port = program.launch.master_port or default_port(run_id)
    run = CommandRun(program, slots, run_id, next(iter(slots)), port, {})
    plan = json.loads(make_command_bundle(run).files[PLAN])
    if arguments.json:
        print(json.dumps({**_NO_PLAN, "problems": [], **plan, "verdict": "fits"}, indent=2))
        return 0
    ranks = f"{count(plan['world_size'], 'rank')} on {count(len(slots), 'node')}"
    print(f"{program.name}: {ranks}; what a program needs of memory and time is not known")
    for number, (node, numbers) in enumerate(run.ranks.items()):
        is_started = number == 0 or run.on_every_node
        command = shlex.join(run.argv(number)) if is_started else f"started by {run.master_addr}"
        print(f"{node}: slots {_listed(slots[node])}; ranks {_listed(numbers)}; {command}")
    return 0


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _corrected(assumptions: Assumptions, run: MeasuredRun) -> Assumptions:
    """Returns the assumptions with a run's correction factors, and with its GPU if none is named."""
    from tridock.plan.from_run import correction_of

    if assumptions.tflops is not None:
        todo = "leave one of the two out"
        got = f"{assumptions.tflops:g}"
        raise RequestError(Problem("--tflops", "sets what --from-run takes from the run", got, todo))
    correction, gpu = correction_of(run, assumptions), assumptions.gpu
    has_rates = gpu is not None and gpu.tflops_16 is not None
    if correction.planned_s is None and gpu is not None and gpu != run.gpu and (has_rates or run.gpu is not None):
        ran = "CPUs or an unknown GPU" if run.gpu is None else f"a {run.gpu.name}"
        what, got = f"is not what {run.source} ran on, {ran}, of which only the run's rate is known", gpu.name
        todo = "give a run on this GPU, the memory of a device alone (as in 24gib), or leave --from-run out"
        if run.gpu is not None:
            todo = "give a run on this GPU, or leave --from-run out"
        raise RequestError(Problem("--gpu", what, got, todo))
    return replace(assumptions, gpu=gpu or run.gpu, correction=correction)


def _with_hosts_gpu(assumptions: Assumptions, cluster: Cluster) -> Assumptions:
    """Returns the assumptions with the GPUs that the hosts report. A plan needs no host; unreachable ones are named."""
    try:
        from tridock.ops.hosts.session import Session
    except ModuleNotFoundError:  # in a container, which reaches no host
        return assumptions
    from tridock.ops.runs.prepare import with_hosts_gpu

    session, failure = Session(cluster).reachable()
    if failure is not None:
        print(failure, file=sys.stderr)
    return with_hosts_gpu(assumptions, session)
