"""Building blocks of the command line: a subcommand with its help, and the options that several subcommands share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Action: TypeAlias = Callable[[argparse.Namespace], int]


def add_command(commands: Commands, name: str, action: Action, summary: str) -> argparse.ArgumentParser:
    """Adds a subcommand. ``action`` runs it and returns the exit code; its docstring is the description."""
    parser = commands.add_parser(name, help=summary, description=action.__doc__)
    parser.set_defaults(action=action)
    return parser


def add_group(commands: Commands, name: str, summary: str) -> Commands:
    """Adds a subcommand that only groups others, and returns where they are added."""
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    return parser.add_subparsers(required=True, metavar="COMMAND")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder: runs/<run-id>")


def add_set(parser: argparse.ArgumentParser) -> None:
    text = "override a field of the experiment, e.g. train.seed=7; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)


def add_slots(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    text = "use only these nodes and slots, e.g. host-a@host-b:0,2"
    parser.add_argument("--include", default="", metavar="NODES", help=text)
    parser.add_argument("--exclude", default="", metavar="NODES", help="use all nodes and slots except these")


def add_workspace(parser: argparse.ArgumentParser, where: str = "") -> None:
    text = f"folder with data/ and runs/{where} (default: the current folder)"
    parser.add_argument("--workspace", type=Path, default=Path(), metavar="DIR", help=text)
