"""``tridock data``: the demo data set, copies to hosts, and the subcommands of ``preprocess`` and ``datasets``."""

import argparse
from pathlib import Path

from tridock.cli import datasets, preprocess
from tridock.cli.options import Commands, add_command, add_group, add_set, add_slots
from tridock.errors import Problem, RequestError


def add(commands: Commands) -> None:
    data = add_group(commands, "data", "build, check and copy training data")
    demo = add_command(data, "demo", _demo, "build a small data set from Python's standard library")
    text = "folder to write to (default: data/demo)"
    demo.add_argument("--folder", type=Path, default=Path("data/demo"), metavar="DIR", help=text)
    preprocess.add(data)
    datasets.add(data)

    sync = add_command(data, "sync", _sync, "copy data to every host that lacks it")
    text = "DeepSpeed hostfile; the cluster's settings are in HOSTFILE.yaml"
    sync.add_argument("--hosts", type=Path, required=True, metavar="HOSTFILE", help=text)
    text = "prefix of a data set, file or folder in the project folder; repeatable (default: what the experiment reads)"
    sync.add_argument("--path", action="append", default=[], help=text)
    text = "YAML file of the experiment (default: that of fab launch)"
    sync.add_argument("--config", default="", metavar="CONFIG", help=text)
    add_set(sync)
    add_slots(sync)
    sync.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")


def _demo(arguments: argparse.Namespace) -> int:
    """Build a small GPT data set from the source files of Python's standard library. Needs no network."""
    from tridock.data.corpus import prepare_demo

    prepare_demo(arguments.folder)
    return 0


def _sync(arguments: argparse.Namespace) -> int:
    """Copy data to every host that lacks it, and compare hashes. fab data does the same."""
    from rich.console import Console

    try:
        from tridock.ops.hosts.session import Session
        from tridock.ops.sync.operation import run
    except ModuleNotFoundError as missing:
        todo = "run it where fab runs (make venv): a node has no ssh access to the hosts"
        raise RequestError(Problem("tridock data sync", "needs the packages of fab", str(missing), todo)) from None
    session = Session.open(arguments.hosts, arguments.include, arguments.exclude)
    say = Console(highlight=False, soft_wrap=True).print
    run(session, arguments.path, arguments.config, arguments.set, say, dry_run=arguments.dry_run)
    return 0
