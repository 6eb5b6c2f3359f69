"""``tridock data``: the demo data set, copies to hosts, and the subcommands of ``preprocess`` and ``datasets``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli import datasets, preprocess
from tridock.cli.options import (
    Commands,
    add_cluster,
    add_command,
    add_config,
    add_group,
    add_quiet,
    add_set,
    config_of,
    open_session,
)
from tridock.cli.output import print_tables, say
from tridock.contracts.environment import DATA_MIRRORS

if TYPE_CHECKING:
    from rich.table import Table


def add(commands: Commands) -> None:
    data = add_group(commands, "data", "build, check and copy training data")
    demo = add_command(data, "demo", _demo, "build a small data set from Python's standard library", "")
    text = "folder to write to (default: data/demo)"
    demo.add_argument("--folder", type=Path, default=Path("data/demo"), metavar="DIR", help=text)
    examples = ("gpt2", "--folder raw --mirror /mnt/share/datasets https://example.org/corpus-0.parquet")
    fetch = add_command(data, "fetch", _fetch, "download GPT-2's vocabulary or any files", *examples)
    text = "gpt2 (gpt2-vocab.json and gpt2-merges.txt), or the URL of a file"
    fetch.add_argument("sources", nargs="+", metavar="SOURCE", help=text)
    text = "folder to write to (default: data)"
    fetch.add_argument("--folder", type=Path, default=Path("data"), metavar="DIR", help=text)
    text = "expected SHA-256 of the file (default: its line in DIR/SHA256SUMS, if any)"
    fetch.add_argument("--sha256", metavar="HASH", help=text)
    text = f"folder or URL with the same files, tried first; repeatable (default: ${DATA_MIRRORS})"
    fetch.add_argument("--mirror", action="append", default=[], metavar="PLACE", help=text)
    add_quiet(fetch)
    preprocess.add(data)
    datasets.add(data)

    examples = ("--hosts hostfile --config configs/demo-3d.yaml", "--hosts hostfile --path data/mine_text_document")
    sync = add_command(data, "sync", _sync, "copy data to every host that lacks it", *examples)
    add_cluster(sync)
    text = "data set prefix, file or folder in the project folder; repeatable (default: what the experiment reads)"
    sync.add_argument("--path", action="append", default=[], help=text)
    add_config(sync, "as for tridock launch")
    add_set(sync)
    sync.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    add_quiet(sync)


def _demo(arguments: argparse.Namespace) -> int:
    """Build a small GPT data set from the source files of Python's standard library. Needs no network."""
    from tridock.data.corpus import prepare_demo

    prepare_demo(arguments.folder)
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    """Download files, resume interrupted downloads, and check the SHA-256 of each file."""
    from tridock.data.fetch import fetch, wanted_files
    from tridock.data.progress import progress_bar

    files = wanted_files(arguments.sources, arguments.sha256)
    mirrors = arguments.mirror or os.environ.get(DATA_MIRRORS, "").split()
    with progress_bar("fetching", quiet=arguments.quiet) as progress:
        fetch(files, arguments.folder, mirrors, progress, print)
    return 0


def _show(shown: str | Table) -> None:
    if isinstance(shown, str):
        say(shown)
    else:
        print_tables(shown)


def _sync(arguments: argparse.Namespace) -> int:
    """Copy data, and Megatron's index maps, to every host that lacks them. Files are compared by hash."""
    session = open_session(arguments)
    from tridock.ops.sync.operation import run

    config = config_of(arguments)
    run(session, arguments.path, config, arguments.set, _show, dry_run=arguments.dry_run)
    return 0
