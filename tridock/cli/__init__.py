"""The command ``tridock``. Start-up stays fast: a subcommand imports what it runs inside its action."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tridock import __version__
from tridock.cli import bench, data, plan, project, runs, slurm, train
from tridock.errors import EXIT_INTERRUPTED, TridockError, extras_explained

if TYPE_CHECKING:
    from tridock.cli.options import Action

_DESCRIPTION = (
    "Plan, run, measure and diagnose distributed training on this machine or a Slurm cluster."
    " To run on a cluster of Docker hosts, use fab: fab --list shows its tasks."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code (docs/architecture.md lists the codes)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # `| tee log` shows each line as soon as it is printed
    arguments = build_parser().parse_args(argv)
    action: Action = arguments.action
    try:
        with extras_explained():
            return action(arguments)
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tridock", description=_DESCRIPTION)
    parser.add_argument(
        "--version", action="version", version=f"tridock {__version__}", help="show the version and exit"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (train, plan, data, slurm, bench, runs, project):
        module.add(commands)
    return parser
