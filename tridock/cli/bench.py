"""``tridock bench`` and ``calibrate``: measurements."""

import signal
import sys
from pathlib import Path

from tridock.cli.options import Arguments, Commands, add_command, output_file
from tridock.cli.output import print_tables
from tridock.errors import EXIT_INTERRUPTED, ClusterError, Problem


def add(commands: Commands) -> None:
    examples: tuple[str, ...] = (
        "--config configs/bench/small.yaml",
        "--config configs/bench/engines.yaml --world 4 --gpu a100-80gb",
    )
    parser = add_command(commands, "bench", _bench, "benchmark a matrix of experiments on this machine", *examples)
    parser.add_config(kind="benchmark")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="results folder (default: runs/bench-<name>)")
    text = "world sizes to measure (default: world of the benchmark file)"
    parser.add_argument("--world", type=int, nargs="+", metavar="N", help=text)
    parser.add_argument("--gpu", help="GPU of this machine (h200, a100-80gb, …), or its memory (24gib), for the plan")

    examples = ("", "--nproc 2 --output laptop.calibration.json", "--hosts hostfile")
    summary = "measure devices and links for the plan's time estimates"
    parser = add_command(commands, "calibrate", _calibrate, summary, *examples)
    parser.add_cluster()
    text = "ranks on this machine, without --hosts (default: one per GPU; 2 without a GPU)"
    parser.add_argument("--nproc", type=int, metavar="N", help=text)
    text = "file to write (default: <hostfile>.calibration.json; calibration.json without --hosts)"
    parser.add_argument("-o", "--output", type=output_file, metavar="FILE", help=text)


def _bench(arguments: Arguments) -> int:
    """Measure throughput, memory and phases of each experiment of a matrix on this machine, and compare them with a
    plain PyTorch loop if the benchmark sets `bare`."""
    from tridock.bench.cells import exit_code_of, load_bench
    from tridock.bench.output import record, table
    from tridock.bench.run import run_bench
    from tridock.gpus import find_gpu
    from tridock.ops.runs.this_machine import gpu_count

    config = arguments.required_config
    bench = load_bench(config, arguments.world)
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu, "--gpu")
    out = arguments.output or Path("runs", f"bench-{config.stem}")
    measured = []
    # SIGTERM stops the current run, as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for cell in run_bench(bench, config.parent, gpu, gpu_count(), print):
            measured.append(cell)
            # Record after each cell: what was measured stays if a later one is interrupted.
            record(measured, bench, out)
    except KeyboardInterrupt:
        results = f"{len(measured)} cells are in {out}" if measured else "nothing was measured"
        print(f"stopped, together with the current run; {results}", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    print_tables(table(measured))
    print(f"results: {out}/results.json, results.md and plots")
    return exit_code_of(measured)


def _calibrate(arguments: Arguments) -> int:
    """Measure matrix products, attention, memory and all-reduces on all slots at the same time, in at most two
    minutes: on this machine, or with --hosts on a cluster whose nodes are up. tridock plan uses the result if it is
    beside the hostfile, or with --calibration."""
    from tridock.ops.calibrate import calibrate_here, calibrate_nodes, calibration_path, summary, write_calibration

    if arguments.hosts is not None:
        from tridock.contracts.node_answers import NodeReport
        from tridock.ops.checks.quick import node_report

        client = arguments.open_client()
        port = node_report(client, client.head, NodeReport).rendezvous.port
        if port is None:
            raise ClusterError(Problem(client.head, "has no free port", "", "stop the programs that use its ports"))
        calibration = calibrate_nodes(client, port)
        output = arguments.output or calibration_path(arguments.hosts)
    else:
        from tridock.ops.runs.this_machine import default_ranks, free_port

        calibration = calibrate_here(arguments.nproc or default_ranks(), free_port())
        output = arguments.output or Path("calibration.json")
    write_calibration(calibration, output)
    print("\n".join(summary(calibration)))
    print(f"written to {output}")
    return 0
