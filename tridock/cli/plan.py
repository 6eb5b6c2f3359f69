"""``tridock plan``."""

import argparse
from pathlib import Path

from tridock.cli.options import Commands, add_command, add_set, add_slots
from tridock.errors import Problem, RequestError


def add(commands: Commands) -> None:
    parser = add_command(commands, "plan", _plan, "check an experiment against a cluster")
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file of the experiment")
    cluster = parser.add_argument_group("cluster", "A hostfile, or a number of equal nodes.")
    text = "DeepSpeed hostfile; the cluster's settings are in HOSTFILE.yaml"
    cluster.add_argument("--hosts", type=Path, metavar="HOSTFILE", help=text)
    add_slots(cluster)
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
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the rank map to a .png or .svg file")
    text = "explain a field of the experiment and its effect on the plan"
    parser.add_argument("--explain", metavar="FIELD", help=text)


def _plan(arguments: argparse.Namespace) -> int:
    """Check an experiment against a cluster before you launch it: print the rank map, the batch arithmetic, and the
    memory and time that it needs, or why it cannot run. Contacts no host.
    """
    if arguments.explain is not None:
        from tridock.plan.explain import explain

        print(explain(arguments.explain))
        return 0
    if arguments.config is None:
        raise RequestError(Problem("CONFIG", "is missing", "", "give the experiment's YAML file"))

    from rich.console import Console

    from tridock.ops.runs.prepare import assumptions_for, slots_of
    from tridock.report.plan_output import Show, print_plan

    cluster, slots = slots_of(
        arguments.hosts, arguments.include, arguments.exclude, arguments.nodes, arguments.gpus_per_node
    )
    assumptions = assumptions_for(cluster, arguments.gpu, arguments.network_gbit, arguments.tflops, arguments.tokens)
    show = Show(arguments.search, arguments.json, str(arguments.plot or ""))
    return print_plan(arguments.config, arguments.set, slots, assumptions, Console(highlight=False), show)
