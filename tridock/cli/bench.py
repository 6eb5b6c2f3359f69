"""``tridock bench``."""

import argparse
import signal
import sys
from pathlib import Path

from tridock.cli.options import Commands, add_command, add_config, require_config
from tridock.cli.output import print_tables
from tridock.errors import EXIT_INTERRUPTED


def add(commands: Commands) -> None:
    examples = ("--config configs/bench/small.yaml", "--config configs/bench/engines.yaml --world 4 --gpu a100-80gb")
    parser = add_command(commands, "bench", _bench, "benchmark a matrix of experiments on this machine", *examples)
    add_config(parser, kind="benchmark")
    text = "results folder (default: runs/bench-<name>)"
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help=text)
    text = "world sizes to measure (default: world of the benchmark file)"
    parser.add_argument("--world", type=int, nargs="+", metavar="N", help=text)
    parser.add_argument("--gpu", help="GPU of this machine (h200, a100-80gb, …), or its memory (24gib), for the plan")


def _bench(arguments: argparse.Namespace) -> int:
    """Measure throughput, memory and phases of each experiment of a matrix on this machine, and compare them with a
    plain PyTorch loop if the benchmark sets `bare`.
    """
    from tridock.bench.cells import exit_code_of, load_bench
    from tridock.bench.output import record, table
    from tridock.bench.run import run_bench
    from tridock.gpus import find_gpu
    from tridock.ops.runs.this_machine import gpu_count

    config = require_config(arguments)
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
