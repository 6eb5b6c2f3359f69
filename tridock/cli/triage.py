"""``tridock triage``."""

from __future__ import annotations

import argparse

from tridock.cli.options import Commands, add_command, add_run


def add(commands: Commands) -> None:
    parser = add_command(commands, "triage", _triage, "explain why a run failed")
    add_run(parser)


def _triage(arguments: argparse.Namespace) -> int:
    """Explain why a run failed: the rank that failed first, the cause, and the fix."""
    from tridock.ops.runs.local_run import triage_here

    print(triage_here(arguments.run))
    return 0
