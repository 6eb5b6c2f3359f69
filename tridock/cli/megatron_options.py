"""Options of Megatron's ``preprocess_data.py`` that change nothing in ``tridock data preprocess``, or are refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from tridock.errors import Problem

_LEAVE: Final = "leave it out"
_CORES: Final = "--workers is all cores by default"
_SENTENCES: Final = "texts are not split into sentences"
_AS_THEY_ARE: Final = ("texts are tokenized as they are", "write the chats as texts first")
_OPTIONS: Final = {
    "--keep-newlines": (0, _SENTENCES, ""),
    "--lang": (None, _SENTENCES, ""),
    "--partitions": (None, "--workers sets the number of processes", ""),
    "--keep-sequential-samples": (0, "documents always keep their order", ""),
    "--workers-to-check": ("+", _CORES, ""),
    "--max-documents": (None, _CORES, ""),
    "--performance-dir": (None, _CORES, ""),
    "--legacy-tokenizer": (0, "each tokenizer is read in one way", ""),
    "--padded-vocab-size": (None, "ids are not padded", ""),
    "--split-sentences": (0, _SENTENCES, f"{_LEAVE} (GPT needs none), or use Megatron's tools/preprocess_data.py"),
    "--find-optimal-num-workers": (0, _CORES, _LEAVE),
    "--trust-remote-code": (0, "the programs of a model are not run", f"{_LEAVE}, and give a tokenizer.json"),
    "--tokenizer-hf-no-use-fast": (0, "ids are those of tokenizer.json", _LEAVE),
    "--tokenizer-sentencepiece-legacy": (0, "each tokenizer is read in one way", _LEAVE),
    "--tokenizer-metadata": (None, "a tokenizer has a type", "give --tokenizer-type and --tokenizer-model"),
    "--vocab-extra-ids": (None, "no tokens are added", f"{_LEAVE}, and set model.vocab_size"),
    "--tokenizer-prompt-format": (None, *_AS_THEY_ARE),
    "--sft-tokenizer-prompt-format": (None, *_AS_THEY_ARE),
    "--image-tag-type": (None, *_AS_THEY_ARE),
    "--force-system-message": (0, *_AS_THEY_ARE),
}
"""By option: the number of its values as for argparse, why it is not needed, and what to do if it is refused."""


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other options of Megatron's preprocess_data.py")
    for option, (nargs, why, todo) in _OPTIONS.items():
        text = f"{'not supported' if todo else 'no effect'}: {why}"
        if nargs == 0:
            group.add_argument(option, action="store_const", const=True, help=text)
        else:
            group.add_argument(option, nargs=nargs, metavar="VALUE", help=text)


def problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    for option, why, todo in _given(arguments):
        if todo:
            yield Problem(option, f"is not supported: {why}", "", todo)


def notes(arguments: argparse.Namespace) -> Iterator[str]:
    for option, why, _ in _given(arguments):
        yield f"{option}: has no effect: {why}"


def _given(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for option, (_, why, todo) in _OPTIONS.items():
        if getattr(arguments, option.removeprefix("--").replace("-", "_")) is not None:
            yield option, why, todo
