"""The parser of all ``tridock`` subcommands, and the handling of their errors."""

import argparse
import errno
import functools
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tridock import __version__
from tridock.cli import (
    bench,
    cluster,
    data,
    interrupts,
    launch,
    plan,
    project,
    rehearse,
    resume,
    run,
    run_list,
    runs,
    shell,
    slurm,
    train,
    watch,
    weights,
)
from tridock.cli.options import Arguments, HelpFormatter, Parser, UsageError
from tridock.cli.output import print_json, problem_documents
from tridock.contracts.appends import NO_ROOM
from tridock.errors import EXIT_INTERRUPTED, Problem, RequestError, TridockError, count, cut
from tridock.extras import extras_explained

_DESCRIPTION: Final = (
    "Plan, run, measure and diagnose distributed training: on a cluster of Docker hosts (launch), on this machine"
    " (train), or on a Slurm cluster (slurm)."
)
_EXIT_BROKEN_PIPE: Final = 141
"""As for a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None, program: str = "tridock") -> int:
    """Runs one subcommand and returns its exit code (docs/architecture.md lists the codes).

    ``program`` is the name shown in help and hints: ``fab`` for Fabric's tasks.
    """
    os.umask(os.umask(0o077) | 0o002)  # of what runs as its user, such as launch.sh, nothing is world-writable
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; a file opened later must not get its descriptor
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  open until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # `| tee log` shows each line as soon as it is printed. File names may be any bytes.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    parser = build_parser(program)
    project.complete(parser)
    given = sys.argv[1:] if argv is None else argv
    own = itertools.takewhile(lambda word: word != "--", given)  # the rest belongs to a program
    as_json = any(len(word) > len("--") and "--json".startswith(word) for word in own)
    try:
        with interrupts.raised(), extras_explained(), _paths_refused():
            arguments = parser.parse_args(given, Arguments())
            code: int = arguments.action(arguments)
            sys.stdout.flush()
    except UsageError as error:
        if as_json:
            print_json(problems=[{"field": "", "message": error.message, "nearest": []}])
        raise
    except TridockError as error:
        if as_json:
            print_json(problems=problem_documents(error))
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return drop_output()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        where = "standard output" if error.filename is None else str(error.filename)
        todo = "free some space there, and run the command again"
        drop_output()
        try:
            print(Problem.of_error(where, "cannot be written", error, todo), file=sys.stderr)
        except OSError:  # standard error is on the same disk
            os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
        return RequestError.exit_code
    return code


def drop_output() -> int:
    """Returns the exit code for a reader that has closed the pipe (`| head`); Python would report the rest at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _EXIT_BROKEN_PIPE


@contextmanager
def _paths_refused() -> Iterator[None]:
    """Converts the OSError of a path that is too long, or closed to the user, into a RequestError, wherever it is
    raised."""
    try:
        yield
    except OSError as error:
        name = str(error.filename)
        if error.errno == errno.ENAMETOOLONG:
            what, got, todo = "is too long for a file's name", count(len(name), "character"), "give the path of a file"
        elif isinstance(error, PermissionError) and error.filename is not None:
            what, got, todo = "cannot be accessed", str(error.strerror), "give yourself access, or use another path"
        else:
            raise
        raise RequestError(Problem(cut(name, 80), what, got, todo)) from None


@functools.cache
def build_parser(program: str = "tridock") -> argparse.ArgumentParser:
    parser = Parser(prog=program, description=_DESCRIPTION, formatter_class=HelpFormatter)
    parser.set_defaults(program=program)
    parser.add_argument(
        "--version", action="version", version=f"tridock {__version__}", help="show the version and exit"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (train, rehearse, plan, cluster, shell, launch, resume, run_list, run, runs, watch):
        module.add(commands)
    for module in (weights, data, slurm, bench, project):
        module.add(commands)
    return parser
