"""The command ``tridock``. Start-up stays fast: a subcommand imports what it runs inside its action."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock import __version__
from tridock.cli import bench, cluster, completion, data, launch, plan, project, run, runs, slurm, train, weights
from tridock.cli.options import HelpFormatter
from tridock.errors import EXIT_INTERRUPTED, TridockError, extras_explained

if TYPE_CHECKING:
    from tridock.cli.options import Action

_DESCRIPTION: Final = (
    "Plan, run, measure and diagnose distributed training: on a cluster of Docker hosts (launch), on this machine"
    " (train), or on a Slurm cluster (slurm)."
)
_EXIT_BROKEN_PIPE: Final = 141
"""As of a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None, program: str = "tridock") -> int:
    """Runs one subcommand and returns its exit code (docs/architecture.md lists the codes).

    ``program`` is the name that help and hints have: ``fab`` for Fabric's tasks.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; a file that is opened later must not take its place
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  open until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # `| tee log` shows each line as soon as it is printed. File names may be any bytes.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    parser = build_parser(program)
    completion.complete(parser)
    try:
        arguments = parser.parse_args(argv)
        action: Action = arguments.action
        with extras_explained():
            code = action(arguments)
        sys.stdout.flush()
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has enough (`| head`). Python would complain at exit about what is left to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return code


def build_parser(program: str = "tridock") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_DESCRIPTION, formatter_class=HelpFormatter)
    parser.set_defaults(program=program)
    parser.add_argument(
        "--version", action="version", version=f"tridock {__version__}", help="show the version and exit"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (train, plan, cluster, launch, run, runs, weights, data, slurm, bench, project, completion):
        module.add(commands)
    return parser
