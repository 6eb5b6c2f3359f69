"""``tridock plan``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tridock.cli.options import (
    Commands,
    add_command,
    add_config,
    add_hosts,
    add_set,
    add_slots,
    config_of,
    find_hostfile,
    output_file,
)
from tridock.cli.output import console

if TYPE_CHECKING:
    from tridock.cluster.settings import Cluster
    from tridock.plan import Assumptions


def add(commands: Commands) -> None:
    examples = (
        "--hosts hostfile --config configs/demo-3d.yaml",
        "--config configs/jean-zay/7.5b.yaml --nodes 4 --gpus-per-node 4 --gpu v100-32gb --search",
        "--explain parallel.tensor_model_parallel_size",
    )
    parser = add_command(commands, "plan", _plan, "check an experiment against a cluster", *examples)
    add_config(parser, "that of tridock launch")
    cluster = parser.add_argument_group("cluster", "A hostfile, or a number of equal nodes.")
    add_hosts(cluster)
    add_slots(cluster)
    text = "contact no host; otherwise they are asked for their GPU if neither --gpu nor the settings name one"
    cluster.add_argument("--offline", action="store_true", help=text)
    cluster.add_argument("--nodes", type=int, metavar="N", help="number of nodes, without a hostfile")
    text = "slots per node, without a hostfile (default: 8)"
    cluster.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help=text)
    cluster.add_argument("--gpu", help="GPU of the nodes (v100-16gb, a100-80gb, h200, …), or its memory (24gib)")
    text = "network bandwidth of a node (default: from the cluster's settings, or 100)"
    cluster.add_argument("--network-gbit", type=float, metavar="GBIT_PER_S", help=text)
    add_set(parser)
    text = "throughput of a GPU for the time estimate (default: half of its peak)"
    parser.add_argument("--tflops", type=float, metavar="TFLOP_PER_S", help=text)
    text = "estimate the time to train N tokens, e.g. 300e9 (default: the tokens of the run)"
    parser.add_argument("--tokens", type=float, metavar="N", help=text)
    text = "list the layouts that fit, best first, and why the others do not"
    parser.add_argument("--search", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="also draw the rank map to a .png or .svg file"
    )
    text = "explain a field of the experiment and its effect on the plan"
    parser.add_argument("--explain", metavar="FIELD", help=text)


def _plan(arguments: argparse.Namespace) -> int:
    """Check an experiment against a cluster before you launch it: print the rank map, the batch arithmetic, and the
    memory and time that it needs, or why it cannot run.
    """
    if arguments.explain is not None:
        from tridock.plan.explain import explain

        print(explain(arguments.explain))
        return 0

    from tridock.ops.runs.default_experiment import choose_experiment
    from tridock.ops.runs.prepare import assumptions_for, slots_of
    from tridock.report.plan_output import Show, print_plan

    hosts = arguments.hosts if arguments.nodes is not None else find_hostfile(arguments)
    cluster, slots = slots_of(hosts, arguments.include, arguments.exclude, arguments.nodes, arguments.gpus_per_node)
    config, overrides, _ = choose_experiment(config_of(arguments), arguments.set, slots)
    assumptions = assumptions_for(cluster, arguments.gpu, arguments.network_gbit, arguments.tflops, arguments.tokens)
    if cluster is not None and assumptions.gpu is None and not arguments.offline:
        assumptions = _with_hosts_gpu(assumptions, cluster)
    show = Show(arguments.search, arguments.json, str(arguments.plot or ""))
    return print_plan(config, overrides, slots, assumptions, console(), show)


def _with_hosts_gpu(assumptions: Assumptions, cluster: Cluster) -> Assumptions:
    """The same on the GPUs that the hosts report. A plan needs no host: those that do not answer are named."""
    try:
        from tridock.ops.hosts.session import Session
    except ModuleNotFoundError:  # in a container, which reaches no host
        return assumptions
    from tridock.ops.runs.prepare import with_hosts_gpu

    session, failure = Session(cluster).reachable()
    if failure is not None:
        print(failure, file=sys.stderr)
    return with_hosts_gpu(assumptions, session)
