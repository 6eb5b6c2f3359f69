"""``tridock replan``."""

from __future__ import annotations

import argparse

from tridock.cli.options import Commands, add_command, add_run


def add(commands: Commands) -> None:
    parser = add_command(commands, "replan", _replan, "show how a run continues after it loses nodes")
    add_run(parser)
    parser.add_argument("--without", action="append", required=True, metavar="NODE", help="lost node; repeatable")
    text = "spare node that may replace a lost one; repeatable"
    parser.add_argument("--spare", action="append", default=[], metavar="NODE", help=text)
    parser.add_argument("--anew", action="store_true", help="start from the beginning, not from a checkpoint")
    parser.add_argument("--json", action="store_true", help="print the new plan and the run's new files as JSON")


def _replan(arguments: argparse.Namespace) -> int:
    """Show how a run continues after it loses nodes: on spare nodes, or with fewer replicas. Changes nothing: the
    supervisor of the run does the same when it restarts the run.
    """
    from tridock.ops.runs.replan import replan

    found = replan(arguments.run, arguments.without, arguments.spare, anew=arguments.anew)
    print(found.to_json() if arguments.json else found.summary, end="" if arguments.json else "\n")
    return 0
