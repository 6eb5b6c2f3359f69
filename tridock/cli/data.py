"""``tridock data``: the demo data set, copies to hosts, data sets, and the subcommands of ``preprocess``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli import preprocess
from tridock.cli.options import Arguments, Commands, Parser, add_command, add_group
from tridock.cli.output import print_json, print_tables, problem_documents, report_failure, say
from tridock.contracts.environment import DATA_MIRRORS
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.dataset.inspect import Inspection
    from tridock.data.dataset.verify import Verified


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
    fetch.add_quiet()
    preprocess.add(data)
    example = "data/mine_text_document"
    inspect = add_command(data, "inspect", _inspect, "print counts, document lengths and samples", example)
    _add_prefixes(inspect)
    text = "vocab.json of GPT-2, or a tokenizer.json, to print the samples as text"
    inspect.add_argument("--vocab-file", type=Path, metavar="FILE", help=text)
    inspect.add_argument("--merge-file", type=Path, metavar="FILE", help="merges.txt of GPT-2")
    inspect.add_argument("--samples", type=int, default=3, metavar="N", help="documents to print (default: 3)")
    inspect.add_flag("--json", "print the data sets as JSON")

    verify = add_command(data, "verify", _verify, "check structure, token ids, counts and checksums", "data")
    _add_prefixes(verify)
    text = "vocabulary size: every token id must be below it (default: from the manifest)"
    verify.add_argument("--vocab-size", type=int, metavar="N", help=text)
    verify.add_quiet()

    example = "--input data/one_text_document data/two_text_document --output-prefix data/both_text_document"
    merge = add_command(data, "merge", _merge, "join data sets into one", example)
    text = "data sets to join, without .bin, or folders that contain some"
    merge.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help=text)
    text = "write PREFIX.bin, .idx and .json"
    merge.add_argument("--output-prefix", type=Path, required=True, metavar="PREFIX", help=text)
    merge.add_quiet()

    summary = "split a data set into train, valid and test, or into equal parts"
    example = "data/mine_text_document --split 969,30,1"
    split = add_command(data, "split", _split, summary, example)
    split.add_argument("prefix", type=Path, metavar="PREFIX", help="data set, without .bin")
    how = split.add_mutually_exclusive_group(required=True)
    how.add_argument("--split", metavar="SHARES", help="shares of train, valid and test, e.g. 969,30,1")
    how.add_argument("--parts", type=int, metavar="N", help="number of parts, with the same number of documents each")
    text = "write OUT_train, … or OUT_0, … (default: the prefix of the data set)"
    split.add_argument("--output-prefix", type=Path, metavar="OUT", help=text)
    split.add_quiet()

    examples = ("--hosts hostfile --config configs/demo-3d.yaml", "--hosts hostfile --path data/mine_text_document")
    sync = add_command(data, "sync", _sync, "copy data and weights to every host that lacks them", *examples)
    sync.add_cluster()
    text = "data set prefix, file or folder in the project folder; repeatable (default: what the experiment reads)"
    sync.add_argument("--path", action="append", default=[], help=text)
    sync.add_config("as for tridock launch")
    sync.add_set()
    sync.add_flag("--dry-run", "print what would be sent, and send nothing")
    text = "compare files by content instead of size and time; reads them all, here and on the hosts"
    sync.add_flag("--checksum", text)
    sync.add_flag("--json", "print what was sent to each node as JSON")
    sync.add_quiet()


def _demo(arguments: Arguments) -> int:
    """Build a small GPT data set from the source files of Python's standard library. Needs no network."""
    from tridock.data.corpus import prepare_demo

    prepare_demo(arguments.folder)
    return 0


def _fetch(arguments: Arguments) -> int:
    """Download files, resume interrupted downloads, and check the SHA-256 of each file."""
    from tridock.data.fetch import fetch, wanted_files
    from tridock.data.progress import progress_bar

    files = wanted_files(arguments.sources, arguments.sha256)
    mirrors = arguments.mirror or os.environ.get(DATA_MIRRORS, "").split()
    with progress_bar("fetching", quiet=arguments.quiet) as progress:
        fetch(files, arguments.folder, mirrors, progress, print)
    return 0


def _sync(arguments: Arguments) -> int:
    """Copy what an experiment reads (data, tokenizer, weights) to every host that lacks it, with rsync; Megatron's
    index maps too."""
    arguments.quiet = arguments.quiet or arguments.json
    hosts = arguments.open_hosts()
    from tridock.ops.sync.operation import run, table

    options = {"dry_run": arguments.dry_run, "checksum": arguments.checksum}
    synced, maps = run(hosts, arguments.path, arguments.named_config, arguments.set, **options)
    failure = synced.nodes.failure()
    if arguments.json:
        print_json(
            nodes=[asdict(row) for row in synced.rows], index_maps=maps or None, problems=problem_documents(failure)
        )
    else:
        print_tables(table(synced.rows, dry_run=arguments.dry_run))
        if maps:
            say(maps)
    return report_failure(failure)


def _add_prefixes(parser: Parser) -> None:
    text = "data set, without .bin, or a folder that contains some"
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=text)


def _inspect(arguments: Arguments) -> int:
    """Print the counts of a data set, a histogram of its document lengths, and sample documents."""
    from rich.console import Console

    from tridock.contracts.tokenizers import sha256s_in
    from tridock.data.dataset.inspect import as_json, inspect, print_inspection
    from tridock.data.dataset.prefixes import find_prefixes
    from tridock.data.tokenize.tokenizer import open_tokenizer

    if problems := list(_inspect_problems(arguments)):
        raise RequestError(problems)
    prefixes = find_prefixes(arguments.prefixes)
    tokenizer = open_tokenizer(arguments.vocab_file, arguments.merge_file) if arguments.vocab_file else None
    is_one_file = arguments.vocab_file is not None and arguments.merge_file is None
    known = sha256s_in(arguments.vocab_file) if is_one_file else ()
    found: list[Inspection] = []
    for prefix in prefixes:
        try:
            found.append(inspect(prefix, arguments.samples, tokenizer, known))
        except RequestError as error:
            problems += error.problems
    if not found:
        raise RequestError(problems)
    if arguments.json:
        print_json(data_sets=[as_json(one) for one in found])
    else:
        # Wide enough for any number: a narrower terminal wraps the lines, and no figure is cut off.
        console = Console(highlight=False, width=max(Console().width, 120))
        for one in found:
            print_inspection(one, console)
    if problems:
        print(RequestError(problems), file=sys.stderr)
        return RequestError.exit_code
    return 0


def _inspect_problems(arguments: Arguments) -> Iterator[Problem]:
    if arguments.samples < 0:
        yield Problem("--samples", "must be at least 0", str(arguments.samples), "give a number of documents")
    if arguments.vocab_file is None and arguments.merge_file is not None:
        yield Problem("--vocab-file", "is required with --merge-file", "", "add the vocab.json of these merges")


def _verify(arguments: Arguments) -> int:
    """Read whole data sets and check their structure, token ids, counts and checksums."""
    from tridock.data.dataset.indexed_dataset import bin_path
    from tridock.data.dataset.prefixes import find_prefixes
    from tridock.data.dataset.verify import verify
    from tridock.data.progress import Done, progress_bar

    if arguments.vocab_size is not None and arguments.vocab_size < 1:
        todo = "give the size of the vocabulary"
        raise RequestError(Problem("--vocab-size", "must be at least 1", str(arguments.vocab_size), todo))
    prefixes = find_prefixes(arguments.prefixes)
    sizes = [bin_path(prefix).stat().st_size if bin_path(prefix).is_file() else 0 for prefix in prefixes]
    found: list[Verified] = []
    with progress_bar("verifying", quiet=arguments.quiet) as progress:

        def report(done: int) -> None:
            progress(Done(sum(sizes[: len(found)]) + done, sum(sizes), 0, 0))

        for prefix in prefixes:
            found.append(verify(prefix, arguments.vocab_size, report))
    for one in found:
        if not one.problems:
            print(one)
    RequestError.raise_for(problem for one in found for problem in one.problems)
    return 0


def _merge(arguments: Arguments) -> int:
    """Join data sets into one, as Megatron's merge_datasets.py does."""
    from tridock.data.dataset.manifest import manifest_path
    from tridock.data.dataset.merge import merge
    from tridock.data.dataset.prefixes import find_prefixes, output_problems
    from tridock.data.progress import Done, progress_bar

    RequestError.raise_for(output_problems(arguments.output_prefix))
    prefixes = find_prefixes(arguments.input)
    with progress_bar("merging", quiet=arguments.quiet) as progress:
        done, missing = merge(prefixes, arguments.output_prefix, lambda done, total: progress(Done(done, total, 0, 0)))
    print(f"{done}, of {len(prefixes)} data sets")
    if missing:
        names = ", ".join(map(str, missing))
        print(f"{manifest_path(done.prefix)}: not written; missing: {names}", file=sys.stderr)
    return 0


def _split(arguments: Arguments) -> int:
    """Divide the documents of a data set into train, valid and test sets, or into equal parts."""
    from tridock.data.dataset.prefixes import output_problems
    from tridock.data.dataset.split import split
    from tridock.data.progress import Done, progress_bar

    if arguments.output_prefix is not None and (problems := list(output_problems(arguments.output_prefix))):
        raise RequestError(problems)
    with progress_bar("splitting", quiet=arguments.quiet) as progress:
        parts = split(
            arguments.prefix,
            arguments.split,
            arguments.parts,
            arguments.output_prefix,
            lambda done, total: progress(Done(done, total, 0, 0)),
        )
    for part in parts:
        print(part)
    return 0
