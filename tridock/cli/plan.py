"""``tridock plan``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tridock.cli.options import Arguments, Commands, add_command, add_hosts, add_slots, output_file
from tridock.cli.output import console, print_json
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
    parser.add_config("as for tridock launch")
    cluster = add_hardware(parser)
    contact = cluster.add_mutually_exclusive_group()
    text = "ask the hosts over ssh for their GPU, if neither --gpu nor the settings name one"
    contact.add_argument("--ask-hosts", action="store_true", help=text)
    contact.add_argument("--offline", action="store_true", help="contact no host (the default)")
    parser.add_set()
    text = "GPU throughput for the time estimate (default: estimated from the shapes of the matrix products)"
    parser.add_argument("--tflops", type=float, metavar="TFLOP_PER_S", help=text)
    text = (
        "attention of the program, in the estimates (default: that of --program, or fused, today's fastest kernel);"
        " flash-2 is FlashAttention-2, flash-triton and flash-1 the first one in Triton and in CUDA; unfused stores the"
        " scores, as Megatron did until 2023"
    )
    parser.add_argument("--attention", choices=_ATTENTION, help=text)
    text = "plan another program as docs/planner.md describes it: nemo, megatron-lm-2021, torchtitan, hf-trainer, …"
    parser.add_argument("--program", dest="other_program", metavar="NAME", help=text)
    parser.add_flag("--no-overlap", "assume that no communication overlaps with computation, whatever the engine does")
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
    parser.add_flag("--search", "list the layouts that fit, best first, and why the others do not")
    text = "list the models of presets, largest first, with the best layout of each on this cluster, until three fit"
    parser.add_flag("--largest", text)
    text = (
        "explain the layout: its time and memory term by term, and why each neighboring layout is better, worse or"
        " refused; with one or two LAYOUTs ('TP4 PP2 MB2', or FIELD=VALUE), compare them term by term"
    )
    parser.add_argument("--why", nargs="*", metavar="LAYOUT", help=text)
    parser.add_flag("--json", "print the plan as JSON")
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="also draw the rank map, or with --search memory against time, into a .png or .svg file",
    )
    text = "explain a field of the experiment and its effect on the plan"
    parser.add_argument("--explain", metavar="FIELD", help=text)
    parser.add_quiet()


def add_hardware(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    cluster = parser.add_argument_group("cluster", "A hostfile, or a number of identical nodes.")
    add_hosts(cluster)
    add_slots(cluster)
    cluster.add_argument("--nodes", type=int, metavar="N", help="number of nodes, without a hostfile")
    text = f"slots per node, without a hostfile (default: {_GPUS_PER_NODE})"
    cluster.add_argument("--gpus-per-node", type=int, metavar="N", help=text)
    cluster.add_argument("--gpu", help="GPU of the nodes (v100-16gb, a100-80gb, h200, …), or its memory (24gib)")
    text = "network bandwidth of a node (default: from the cluster's settings, or that of a DGX with this GPU)"
    cluster.add_argument("--network-gbit", type=float, metavar="GBIT_PER_S", help=text)
    return cluster


def slots_named(arguments: Arguments) -> tuple[Cluster | None, Mapping[str, Sequence[int]]]:
    """Returns the cluster that these options name, if it has a hostfile, and its slots."""
    from tridock.ops.runs.prepare import slots_of

    hosts = arguments.hosts if arguments.nodes is not None else arguments.found_hostfile
    per_node = _GPUS_PER_NODE if arguments.gpus_per_node is None else arguments.gpus_per_node
    return slots_of(hosts, arguments.include, arguments.exclude, arguments.nodes, per_node)


def calibrated(assumptions: Assumptions, cluster: Cluster | None, named: Path | None = None) -> Assumptions:
    """Returns them with the ``named`` output of tridock calibrate, else with the cluster's own, if it has one."""
    from tridock.ops.calibrate import calibration_path, read_calibration

    own = None if cluster is None else calibration_path(cluster.hostfile_path)
    calibration = named or (own if own is not None and own.exists() else None)
    if calibration is None:
        return assumptions
    return replace(assumptions, calibration=read_calibration(calibration), calibration_source=str(calibration))


def _plan(arguments: Arguments) -> int:
    """Check an experiment against a cluster before you launch it: print the rank map, the batch sizes, and the
    memory and time that it needs, or why it cannot run."""
    if arguments.explain is not None:
        from tridock.plan.explain import explain

        explained = explain(arguments.explain)
        if arguments.json:
            print_json(explanation=explained, problems=[])
        else:
            print(explained)
        return 0
    try:
        return _planned(arguments)
    except RequestError as error:
        if not arguments.json:
            raise
        print_json(problems=[problem.document for problem in error.problems], **_NO_PLAN)
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


def _planned(arguments: Arguments) -> int:
    from tridock.experiment import is_command, load_command
    from tridock.ops.runs.default_experiment import choose_experiment
    from tridock.ops.runs.preflight import known_problems
    from tridock.ops.runs.prepare import assumptions_for, failures_for
    from tridock.report.measured_run import read_measured_run
    from tridock.report.plan_output import Show, print_plan

    _refuse_unused(arguments)
    run = None if arguments.from_run is None else read_measured_run(arguments.from_run)
    config, cluster = arguments.named_config, None
    if run is not None and arguments.nodes is None and arguments.hosts is None:
        slots = run.slots
    else:
        cluster, slots = slots_named(arguments)
    if run is not None and config is None:
        config = arguments.from_run / EXPERIMENT
    if config is not None and is_command(config):
        of_model = ("search", "largest", "why", "plot")
        if given := [f"--{name}" for name in of_model if getattr(arguments, name) not in (None, False)]:
            what, todo = "is your own program, without a model", "leave them out: they are about a model"
            raise RequestError(Problem(str(config), what, ", ".join(given), todo))
        return print_program(load_command(config, arguments.set), slots, as_json=arguments.json)
    other = arguments.other_program
    named = [] if other is None else [f"program={json.dumps(other)}"]
    config, overrides, _ = choose_experiment(config, [*arguments.set, *named], slots)
    assumptions = assumptions_for(
        cluster, arguments.gpu, arguments.network_gbit, arguments.tflops, arguments.tokens, arguments.cost_per_gpu_hour
    )
    failures = failures_for(arguments.node_mtbf, arguments.checkpoint_gb_s, arguments.restart_time)
    assumptions = replace(
        assumptions, attention=arguments.attention, overlaps=not arguments.no_overlap, failures=failures
    )
    assumptions = calibrated(assumptions, cluster, arguments.calibration)
    if cluster is not None and assumptions.gpu is None and arguments.ask_hosts:
        assumptions = _with_hosts_gpu(assumptions, cluster)
    if run is not None:
        assumptions = _corrected(assumptions, run)
    if problems := known_problems(config, overrides, slots, assumptions):
        if arguments.json:
            print_json(problems=[problem.document for problem in problems], **_NO_PLAN)
            return RequestError.exit_code
        raise RequestError([replace(problem, where=f"{config}: {problem.where}") for problem in problems])
    if arguments.largest:
        return _print_largest(config, overrides, slots, assumptions, arguments)
    as_json = print_json if arguments.json else None
    if arguments.why is not None:
        if len(arguments.why) > 2:
            raise RequestError(Problem("--why", "takes at most two layouts", str(len(arguments.why)), "leave some out"))
        from tridock.report.why_output import print_why

        return print_why(config, overrides, slots, assumptions, console(), arguments.why, as_json)
    show = Show(arguments.search, as_json, str(arguments.plot or ""), arguments.quiet)
    return print_plan(config, overrides, slots, assumptions, console(), show)


def _print_largest(
    config: Path,
    overrides: Sequence[str],
    slots: Mapping[str, Sequence[int]],
    assumptions: Assumptions,
    arguments: Arguments,
) -> int:
    """Prints the largest presets' models with their best layouts. Raises :class:`RequestError` if none works."""
    from tridock.experiment import load_experiment
    from tridock.experiment.presets import PRESETS
    from tridock.plan.largest import largest
    from tridock.progress import bars
    from tridock.report.plan_output import as_options
    from tridock.report.plan_text import LABELS, count_short, headed_table, seconds

    presets = {name: load_experiment(config, [*overrides, f"model.preset={name}"]) for name in PRESETS}
    with bars(quiet=arguments.quiet) as begin:
        bar = begin("search", None, unit="layouts")
        found = list(largest(presets, slots, str(config), assumptions, bar.set))
    works = [one for _, _, one in found if not isinstance(one, str)]
    if not works:
        what, todo = f"trains the model of no preset here: {found[-1][2]}", "use more GPUs, or GPUs with more memory"
        raise RequestError(Problem(str(config), what, "", todo))
    columns = ("preset", "size", "layout", "GiB", "time")
    table, shown = headed_table("Models, the largest first", columns, left=("preset", "layout")), []
    for name, size, one in found:
        row, document = (str(one), "-", "-"), dict[str, Any](verdict=None, reason=one)
        if not isinstance(one, str):
            document, tight = one.layout_document(), "" if one.verdict == "fits" else f" ({one.verdict})"
            row = (f"{one.label}{tight}", f"{document['total_gib']:.1f}", seconds(document["seconds"]))
        table.add_row(name, count_short(size), *row)
        shown.append({"preset": name, "parameters": size, **document})
    if arguments.json:
        print_json(largest=shown, problems=[])
        return 0
    console().print(table)
    best = next((one for one in works if one.verdict == "fits"), works[0])
    print(f"\nLargest ({LABELS[best.verdict]}): {as_options(best.changes)}")
    return 0


def _refuse_unused(arguments: Arguments) -> None:
    """Raises :class:`RequestError` for options without effect beside the others."""
    of_run = arguments.from_run is not None and arguments.hosts is None
    problems = list(unused_slots(arguments, has_hostfile=arguments.nodes is None and not of_run))
    alone = "--why" if arguments.why is not None else "--largest"
    unused = {
        "--search": arguments.search or None, "--plot": arguments.plot, "--tokens": arguments.tokens,
        "--cost-per-gpu-hour": arguments.cost_per_gpu_hour, "--node-mtbf": arguments.node_mtbf,
        "--largest": None if arguments.why is None else arguments.largest or None,
    }  # fmt: skip
    for option, value in unused.items():
        if (arguments.why is not None or arguments.largest) and value is not None:
            problems.append(Problem(option, f"has no effect with {alone}", "", "leave one of the two out"))
    if arguments.ask_hosts and (arguments.nodes is not None or of_run):
        problems.append(Problem("--ask-hosts", "asks the hosts of a hostfile", "", _GIVE_HOSTS))
    RequestError.raise_for(problems)


def unused_slots(arguments: Arguments, *, has_hostfile: bool) -> Iterator[Problem]:
    """Yields options of the cluster without effect beside the others."""
    if arguments.gpus_per_node is not None and arguments.nodes is None:
        got, todo = str(arguments.gpus_per_node), "give --nodes too, or leave it out"
        yield Problem("--gpus-per-node", "is the number of slots of --nodes", got, todo)
    for option, text in (("--include", arguments.include), ("--exclude", arguments.exclude)):
        if text and not has_hostfile:
            yield Problem(option, "selects nodes of a hostfile", text, _GIVE_HOSTS)


_GIVE_HOSTS: Final = "give --hosts instead of --nodes, or leave it out"


def print_program(program: CommandExperiment, slots: Mapping[str, Sequence[int]], *, as_json: bool = False) -> int:
    """Prints your own program on its slots; its memory and time are unknown."""
    from tridock.contracts.run_folder import new_run_id
    from tridock.launchers.command import argv_of, on_every_node
    from tridock.launchers.run import Run
    from tridock.launchers.ssh import Ssh

    run = Run(program, slots, new_run_id(program.name), master_addr=next(iter(slots)))
    commands = [argv_of(run, Ssh(), number) for number in range(len(slots))]
    plan = json.loads(run.document)
    if as_json:
        print_json(**{**_NO_PLAN, "problems": [], **plan, "verdict": "fits"})
        return 0
    ranks = f"{count(plan['world_size'], 'rank')} on {count(len(slots), 'node')}"
    print(f"{program.name}: {ranks}; what a program needs of memory and time is not known")
    for number, (node, numbers) in enumerate(run.ranks.items()):
        is_started = number == 0 or on_every_node(run, Ssh())
        command = shlex.join(commands[number]) if is_started else f"started by {run.master_addr}"
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
    from tridock.ops.hosts.client import reachable
    from tridock.ops.hosts.hosts import Hosts
    from tridock.ops.runs.prepare import with_hosts_gpu

    client, failure = reachable(Hosts(cluster))
    if failure is not None:
        print(failure, file=sys.stderr)
    return with_hosts_gpu(assumptions, client.states)
