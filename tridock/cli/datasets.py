"""What looks after data: flags to work, and what is said on the way. Results go to standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Final

from rich.console import Console

from tridock.data.dataset.indexed_dataset import bin_path
from tridock.data.dataset.inspect import Inspection, inspect
from tridock.data.dataset.inspect_output import as_json, print_inspection
from tridock.data.dataset.manifest import manifest_path
from tridock.data.dataset.merge import merge
from tridock.data.dataset.prefixes import check_output, find_prefixes
from tridock.data.dataset.split import split
from tridock.data.dataset.verify import Verified, verify
from tridock.data.input.documents import rejects_problems
from tridock.data.input.sources import Kind, find_sources, kind_of_name
from tridock.data.preprocess import Done
from tridock.data.progress import progress_bar
from tridock.data.tokenize.tokenizer import END_OF_TEXT, SMALLEST_VOCABULARY, open_tokenizer
from tridock.data.tokenize.train import Request, train_tokenizer
from tridock.errors import Problem, RequestError

_MOST_TOKENS: Final = 2**31 - 1
"""Ids are int32 at most."""


def run_inspect(arguments: argparse.Namespace) -> None:
    """One data set after another. Raises :class:`RequestError` with all that could not be."""
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
    if arguments.json:
        print(json.dumps([as_json(one) for one in found], indent=2))
    else:
        # Wide enough for numbers of any size: where a terminal is narrower it wraps them, and none is cut off.
        console = Console(highlight=False, width=max(Console().width, 120))
        for one in found:
            print_inspection(one, console)
    if problems:
        raise RequestError(problems)


def _inspect_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    if arguments.samples < 0:
        yield Problem("--samples", "must be at least 0", str(arguments.samples), "give a number of documents")
    if arguments.vocab_file is None and arguments.merge_file is not None:
        todo = "add the vocab.json of these merges"
        yield Problem("--vocab-file", "is missing, which --merge-file needs", "", todo)


def run_verify(arguments: argparse.Namespace) -> None:
    """A line for each data set that is whole. Raises :class:`RequestError` with all that is wrong with the others."""
    if arguments.vocab_size is not None and arguments.vocab_size < 1:
        todo = "give the number of tokens of the vocabulary"
        raise RequestError(Problem("--vocab-size", "must be at least 1", str(arguments.vocab_size), todo))
    prefixes = find_prefixes(arguments.prefixes)
    sizes = [bin_path(prefix).stat().st_size if bin_path(prefix).is_file() else 0 for prefix in prefixes]
    found: list[Verified] = []
    with progress_bar("verifying") as progress:

        def tell(done: int) -> None:
            progress(Done(sum(sizes[: len(found)]) + done, sum(sizes), 0, 0))

        for prefix in prefixes:
            found.append(verify(prefix, arguments.vocab_size, tell))
    for one in found:
        if not one.problems:
            print(one)
    if problems := [problem for one in found for problem in one.problems]:
        raise RequestError(problems)


def run_merge(arguments: argparse.Namespace) -> None:
    """Says what was made, and of a manifest that could not be. Raises :class:`RequestError`."""
    check_output(arguments.output_prefix)
    prefixes = find_prefixes(arguments.input)
    with progress_bar("merging") as progress:
        done, missing = merge(prefixes, arguments.output_prefix, lambda done, total: progress(Done(done, total, 0, 0)))
    print(f"{done}, of {len(prefixes)} data sets")
    if missing:
        names = ", ".join(map(str, missing))
        print(f"{manifest_path(done.prefix)}: is not written, for there is no {names}", file=sys.stderr)


def run_split(arguments: argparse.Namespace) -> None:
    """Says what was made. Raises :class:`RequestError`."""
    if arguments.output_prefix is not None:
        check_output(arguments.output_prefix)
    with progress_bar("splitting") as progress:
        done = split(
            arguments.prefix,
            arguments.split,
            arguments.parts,
            arguments.output_prefix,
            lambda done, total: progress(Done(done, total, 0, 0)),
        )
    for one in done:
        print(one)


def run_train_tokenizer(arguments: argparse.Namespace) -> None:
    """Says what was learned. Raises :class:`RequestError`."""
    if problems := list(_problems(arguments)):
        raise RequestError(problems)
    form = None if arguments.input_format == "auto" else Kind(arguments.input_format)
    request = Request(
        sources=find_sources(arguments.input, lambda name: form or kind_of_name(name, Kind.JSONL)),
        keys=tuple(dict.fromkeys(arguments.json_keys)),
        vocab_size=arguments.vocab_size,
        output=arguments.output,
        rejects=arguments.rejects,
    )
    with progress_bar("reading") as progress:
        done = train_tokenizer(request, progress, lambda line: print(line, file=sys.stderr))
    print(done)


def _problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """All flags of train-tokenizer that cannot be done as asked for."""
    size = arguments.vocab_size
    if size < SMALLEST_VOCABULARY:
        what = f"must be at least {SMALLEST_VOCABULARY}: every byte and {END_OF_TEXT}"
        yield Problem("--vocab-size", what, str(size), "raise it")
    if size > _MOST_TOKENS:
        yield Problem("--vocab-size", f"must be at most {_MOST_TOKENS}, for ids are int32", str(size), "lower it")
    if arguments.output.exists() and not arguments.output.is_dir():
        yield Problem("--output", "is not a folder", str(arguments.output), "name a folder")
    yield from rejects_problems(arguments.on_error, arguments.rejects)
