"""``tridock calibrate``."""

import argparse
from pathlib import Path

from tridock.cli.options import Commands, add_cluster, add_command, open_session, output_file
from tridock.errors import ClusterError, Problem


def add(commands: Commands) -> None:
    examples = ("", "--nproc 2 --output laptop.calibration.json", "--hosts hostfile")
    summary = "measure devices and links for the plan's time estimates"
    parser = add_command(commands, "calibrate", _calibrate, summary, *examples)
    add_cluster(parser)
    text = "ranks on this machine, without --hosts (default: one per GPU; 2 without a GPU)"
    parser.add_argument("--nproc", type=int, metavar="N", help=text)
    text = "file to write (default: <hostfile>.calibration.json; calibration.json without --hosts)"
    parser.add_argument("-o", "--output", type=output_file, metavar="FILE", help=text)


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure matrix products, attention, memory and all-reduces on all slots at the same time, in at most two
    minutes: on this machine, or with --hosts on a cluster whose nodes are up. tridock plan uses the result if it is
    beside the hostfile, or with --calibration.
    """
    from tridock.ops.calibrate import beside, calibrate_here, calibrate_nodes, summary, write_calibration

    if arguments.hosts is not None:
        from tridock.contracts.node_answers import NodeReport
        from tridock.ops.doctor.check import node_report

        session = open_session(arguments)
        port = node_report(session, session.head, NodeReport).rendezvous.port
        if port is None:
            raise ClusterError(Problem(session.head, "has no free port", "", "stop the programs that use its ports"))
        calibration = calibrate_nodes(session, port)
        output = arguments.output or beside(arguments.hosts)
    else:
        from tridock.ops.runs.this_machine import default_ranks, free_port

        calibration = calibrate_here(arguments.nproc or default_ranks(), free_port())
        output = arguments.output or Path("calibration.json")
    write_calibration(calibration, output)
    print("\n".join(summary(calibration)))
    print(f"written to {output}")
    return 0
