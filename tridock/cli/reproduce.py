"""``tridock reproduce``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.options import Commands, add_command, add_run, add_workspace
from tridock.errors import RunError

if TYPE_CHECKING:
    from tridock.differences import Difference
    from tridock.reproduction.outcome import Outcome


def add(commands: Commands) -> None:
    parser = add_command(commands, "reproduce", _reproduce, "repeat a run and compare the losses")
    add_run(parser)
    add_workspace(parser)
    text = "compare with this existing run instead of repeating RUN"
    parser.add_argument("--against", type=Path, metavar="RUN", help=text)
    text = (
        "allowed loss difference, relative to max(1, abs(loss))"
        " (default: 0 on CPUs; on GPUs 1e-4 in fp32, otherwise 1e-2)"
    )
    parser.add_argument("--tolerance", type=float, help=text)
    parser.add_argument("--force", action="store_true", help="repeat the run even if the data or the GPUs have changed")


def _reproduce(arguments: argparse.Namespace) -> int:
    """Repeat a run from its folder and compare environment and losses with the original. The exit code is 4 if the
    losses differ.
    """
    from rich.console import Console

    from tridock.contracts import run_folder
    from tridock.ops.runs.reproduce import compare_with, reproduce_here
    from tridock.report.run_tables import environment_table, verdict_table

    console = Console(highlight=False)

    def print_environment(differences: Sequence[Difference], notes: Sequence[str]) -> None:
        console.print(environment_table(differences))
        for note in notes:
            print(f"note: {note}")

    run, code = arguments.run, 0
    if arguments.against is not None:
        outcome: Outcome | None = compare_with(run, arguments.against, print_environment, arguments.tolerance)
    else:
        options = {"tolerance": arguments.tolerance, "force": arguments.force}
        outcome, code = reproduce_here(run, arguments.workspace, print_environment, **options)
    if outcome is None:
        return code
    console.print(verdict_table(outcome))
    print(f"written to  {run_folder.REPRODUCTION} in the folder of {outcome.now}")
    return RunError.exit_code if outcome.verdict == "different" else 0
