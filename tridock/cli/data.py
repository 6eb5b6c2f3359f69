"""``tridock data``: its subcommands and their flags. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_data_commands(data: Commands) -> None:
    """Adds them to ``tridock data``; each sets ``action``, which gives the exit code."""
    demo = data.add_parser("demo", help="the Python standard library's sources as a small data set")
    demo.add_argument("--folder", type=Path, default=Path("data/demo"), help="where it goes (default: data/demo)")
    demo.set_defaults(action=_demo)

    preprocess = data.add_parser(
        "preprocess", help="texts to Megatron's .bin/.idx, with the flags of preprocess_data.py"
    )
    _preprocess_options(preprocess)
    preprocess.set_defaults(action=_preprocess)

    train = data.add_parser("train-tokenizer", help="byte-level BPE of texts, in GPT-2's files and as tokenizer.json")
    _train_tokenizer_options(train)
    train.set_defaults(action=_train_tokenizer)

    inspect = data.add_parser("inspect", help="counts, lengths with a histogram, samples")
    _prefixes(inspect)
    inspect.add_argument("--vocab-file", type=Path, help="show texts: GPT-2's vocab.json, or a tokenizer.json")
    inspect.add_argument("--merge-file", type=Path, help="GPT-2's merges.txt")
    inspect.add_argument("--samples", type=int, default=3, help="documents to show (default: 3)")
    inspect.add_argument("--json", action="store_true", help="print a list of objects, for programs")
    inspect.set_defaults(action=_inspect)

    verify = data.add_parser("verify", help="go through all of it: structure, tokens, counts, checksums")
    _prefixes(verify)
    verify.add_argument("--vocab-size", type=int, help="tokens lie below it (default: the manifest's)")
    verify.set_defaults(action=_verify)

    merge = data.add_parser("merge", help="data sets to one, as merge_datasets.py does")
    merge.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="prefixes, or folders that hold some"
    )
    merge.add_argument("--output-prefix", type=Path, required=True, help="PREFIX.bin, .idx and .json")
    merge.set_defaults(action=_merge)

    split = data.add_parser("split", help="a data set to train, valid and test, or to equal parts")
    split.add_argument("prefix", type=Path, metavar="PREFIX", help="the data set, without .bin")
    how = split.add_mutually_exclusive_group(required=True)
    how.add_argument("--split", metavar="SHARES", help="of train, valid and test: 969,30,1")
    how.add_argument("--parts", type=int, help="so many parts of as many documents each")
    split.add_argument("--output-prefix", type=Path, help="PREFIX_train, PREFIX_0, … (default: the data set's)")
    split.set_defaults(action=_split)


def _prefixes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefixes", nargs="+", metavar="PREFIX", help="data sets without .bin, or folders that hold some"
    )


def _texts(given: argparse._ArgumentGroup) -> None:
    given.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="files, folders, patterns, or - for standard input; gzip, zstd, bz2, xz",
    )
    given.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys to take (default: text); preprocess makes a data set of each",
    )
    given.add_argument(
        "--input-format", choices=["auto", "jsonl", "text"], default="auto", help="text: every line is a document"
    )


def _rejects(made: argparse._ArgumentGroup) -> None:
    made.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="at a line that is no document")
    made.add_argument("--rejects", type=Path, metavar="FILE", help="where skipped lines go, with the reasons")


def _train_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    _texts(parser.add_argument_group("input"))
    made = parser.add_argument_group("output")
    made.add_argument("--vocab-size", type=int, required=True, help="tokens, every byte and <|endoftext|> among them")
    made.add_argument("--output", type=Path, required=True, help="folder for tokenizer.json, vocab.json, merges.txt")
    _rejects(made)


def _preprocess_options(parser: argparse.ArgumentParser) -> None:
    given = parser.add_argument_group("input")
    _texts(given)
    given.add_argument("--split-sentences", action="store_true", help="refused: texts are not split into sentences")
    given.add_argument("--keep-newlines", action="store_true", help="only has a meaning with --split-sentences")
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type", required=True, help="GPT2BPETokenizer, or vocab (white space, a JSON file)"
    )
    tokenizer.add_argument("--vocab-file", type=Path, required=True, help="GPT-2's vocab.json, or a tokenizer.json")
    tokenizer.add_argument("--merge-file", type=Path, help="GPT-2's merges.txt")
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with <|endoftext|>")
    tokenizer.add_argument(
        "--encoder", choices=["auto", "reference"], default="auto", help="reference: never the fast library"
    )
    made = parser.add_argument_group("output")
    made.add_argument("--output-prefix", type=Path, required=True, help="PREFIX_<key>_document.bin, .idx and .json")
    made.add_argument("--dataset-impl", default="mmap", help="mmap is the only one that is written")
    _rejects(made)
    run = parser.add_argument_group("run")
    run.add_argument("--workers", type=int, help="processes (default: one a core)")
    run.add_argument("--log-interval", type=int, help="away from a terminal: a line every so many documents")
    run.add_argument("--resume", action="store_true", help="go on where a killed run was")


def _demo(arguments: argparse.Namespace) -> int:
    from tridock.data.corpus import prepare_demo

    prepare_demo(arguments.folder)
    return 0


def _preprocess(arguments: argparse.Namespace) -> int:
    from tridock.cli.preprocess import run

    run(arguments)
    return 0


def _train_tokenizer(arguments: argparse.Namespace) -> int:
    from tridock.cli.datasets import run_train_tokenizer

    run_train_tokenizer(arguments)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from tridock.cli.datasets import run_inspect

    run_inspect(arguments)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from tridock.cli.datasets import run_verify

    run_verify(arguments)
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from tridock.cli.datasets import run_merge

    run_merge(arguments)
    return 0


def _split(arguments: argparse.Namespace) -> int:
    from tridock.cli.datasets import run_split

    run_split(arguments)
    return 0
