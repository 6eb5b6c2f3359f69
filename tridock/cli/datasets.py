"""``tridock data inspect``, ``verify``, ``merge`` and ``split``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.options import Commands, add_command, add_quiet
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.dataset.inspect import Inspection
    from tridock.data.dataset.verify import Verified


def add(commands: Commands) -> None:
    example = "data/mine_text_document"
    inspect = add_command(commands, "inspect", _inspect, "print counts, document lengths and samples", example)
    _add_prefixes(inspect)
    text = "vocab.json of GPT-2, or a tokenizer.json, to print the samples as text"
    inspect.add_argument("--vocab-file", type=Path, metavar="FILE", help=text)
    inspect.add_argument("--merge-file", type=Path, metavar="FILE", help="merges.txt of GPT-2")
    inspect.add_argument("--samples", type=int, default=3, metavar="N", help="documents to print (default: 3)")
    inspect.add_argument("--json", action="store_true", help="print a JSON list with an object per data set")

    verify = add_command(commands, "verify", _verify, "check structure, token ids, counts and checksums", "data")
    _add_prefixes(verify)
    text = "vocabulary size: every token id must be below it (default: from the manifest)"
    verify.add_argument("--vocab-size", type=int, metavar="N", help=text)
    add_quiet(verify)

    example = "--input data/one_text_document data/two_text_document --output-prefix data/both_text_document"
    merge = add_command(commands, "merge", _merge, "join data sets into one", example)
    text = "data sets to join, without .bin, or folders that contain some"
    merge.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help=text)
    text = "write PREFIX.bin, .idx and .json"
    merge.add_argument("--output-prefix", type=Path, required=True, metavar="PREFIX", help=text)
    add_quiet(merge)

    summary, example = (
        "split a data set into train, valid and test, or into equal parts",
        "data/mine_text_document --split 969,30,1",
    )
    split = add_command(commands, "split", _split, summary, example)
    split.add_argument("prefix", type=Path, metavar="PREFIX", help="data set, without .bin")
    how = split.add_mutually_exclusive_group(required=True)
    how.add_argument("--split", metavar="SHARES", help="shares of train, valid and test, e.g. 969,30,1")
    how.add_argument("--parts", type=int, metavar="N", help="number of parts, with the same number of documents each")
    text = "write OUT_train, … or OUT_0, … (default: the prefix of the data set)"
    split.add_argument("--output-prefix", type=Path, metavar="OUT", help=text)
    add_quiet(split)


def _add_prefixes(parser: argparse.ArgumentParser) -> None:
    text = "data set, without .bin, or a folder that contains some"
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=text)


def _inspect(arguments: argparse.Namespace) -> int:
    """Print the counts of a data set, a histogram of its document lengths, and sample documents."""
    from rich.console import Console

    from tridock.data.dataset.inspect import as_json, inspect, print_inspection
    from tridock.data.dataset.prefixes import find_prefixes
    from tridock.data.tokenize.tokenizer import open_tokenizer

    if problems := list(_inspect_problems(arguments)):
        raise RequestError(problems)
    prefixes = find_prefixes(arguments.prefixes)
    tokenizer = open_tokenizer(arguments.vocab_file, arguments.merge_file) if arguments.vocab_file else None
    found: list[Inspection] = []
    for prefix in prefixes:
        try:
            found.append(inspect(prefix, arguments.samples, tokenizer))
        except RequestError as error:
            problems += error.problems
    if not found:
        raise RequestError(problems)
    if arguments.json:
        print(json.dumps([as_json(one) for one in found], indent=2))
    else:
        # Wide enough for any number: a narrower terminal wraps the lines, and no figure is cut off.
        console = Console(highlight=False, width=max(Console().width, 120))
        for one in found:
            print_inspection(one, console)
    if problems:
        print(RequestError(problems), file=sys.stderr)
        return RequestError.exit_code
    return 0


def _inspect_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    if arguments.samples < 0:
        yield Problem("--samples", "must be at least 0", str(arguments.samples), "give a number of documents")
    if arguments.vocab_file is None and arguments.merge_file is not None:
        yield Problem("--vocab-file", "is required with --merge-file", "", "add the vocab.json of these merges")


def _verify(arguments: argparse.Namespace) -> int:
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
    if problems := [problem for one in found for problem in one.problems]:
        raise RequestError(problems)
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    """Join data sets into one, as Megatron's merge_datasets.py does."""
    from tridock.data.dataset.manifest import manifest_path
    from tridock.data.dataset.merge import merge
    from tridock.data.dataset.prefixes import find_prefixes, output_problems
    from tridock.data.progress import Done, progress_bar

    if problems := list(output_problems(arguments.output_prefix)):
        raise RequestError(problems)
    prefixes = find_prefixes(arguments.input)
    with progress_bar("merging", quiet=arguments.quiet) as progress:
        done, missing = merge(prefixes, arguments.output_prefix, lambda done, total: progress(Done(done, total, 0, 0)))
    print(f"{done}, of {len(prefixes)} data sets")
    if missing:
        names = ", ".join(map(str, missing))
        print(f"{manifest_path(done.prefix)}: not written; missing: {names}", file=sys.stderr)
    return 0


def _split(arguments: argparse.Namespace) -> int:
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
