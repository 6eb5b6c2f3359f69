"""``tridock data preprocess``: flags to a request, and what is said on the way."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tridock.data.input.documents import rejects_problems
from tridock.data.input.sources import Kind, find_sources, kind_of_name
from tridock.data.preprocess import Preprocessed, Request, preprocess
from tridock.data.progress import progress_bar
from tridock.data.resumable_build import unfinished_folder
from tridock.data.tokenize.blocks import Recipe
from tridock.data.tokenize.encoders import Encoder, Reference, Vocabulary, check_ids_fit, fastest
from tridock.data.tokenize.malloc import return_what_is_freed
from tridock.data.tokenize.tokenizer import open_tokenizer
from tridock.errors import Problem, RequestError

_GPT2: Final = "GPT2BPETokenizer"
_VOCAB: Final = "vocab"


def run(arguments: argparse.Namespace) -> Preprocessed:
    """Says what it does on standard error, the result on standard output. Raises :class:`RequestError`."""
    if problems := list(_problems(arguments)):
        raise RequestError(problems)
    return_what_is_freed()
    sources = find_sources(arguments.input, lambda name: _kind(arguments, name))
    workers = arguments.workers or len(os.sched_getaffinity(0))
    with _uncollected():
        encoder, notes = _encoder(arguments, workers)
    check_ids_fit(encoder, str(arguments.vocab_file))
    if arguments.keep_newlines:
        notes.append("--keep-newlines: changes nothing without --split-sentences")
    for note in notes:
        print(note, file=sys.stderr)
    request = Request(
        sources=sources,
        output_prefix=arguments.output_prefix,
        recipe=Recipe(encoder, tuple(dict.fromkeys(arguments.json_keys)), arguments.append_eod),
        level="sentence" if arguments.tokenizer_type == _VOCAB else "document",
        workers=workers,
        rejects=arguments.rejects,
        resume=arguments.resume,
    )
    try:
        with progress_bar("tokenizing", arguments.log_interval) as progress:
            done = preprocess(request, progress)
    except BaseException:
        if (folder := unfinished_folder(request.output_prefix)).exists():
            print(f"{folder}: holds the work so far; --resume goes on with it", file=sys.stderr)
        raise
    print(done)
    return done


@contextmanager
def _uncollected() -> Iterator[None]:
    """A vocabulary is a hundred thousand small objects that stay: the collector need not look for them meanwhile, nor
    ever after (which would also give each forked worker a copy of them)."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """All flags that cannot be done as asked for."""
    if arguments.split_sentences:
        todo = "leave it out (GPT needs none), or use Megatron's tools/preprocess_data.py"
        yield Problem("--split-sentences", "is not done: texts are not split into sentences", "", todo)
    if arguments.tokenizer_type not in (_GPT2, _VOCAB):
        got = arguments.tokenizer_type
        yield Problem("--tokenizer-type", f"must be {_GPT2} or {_VOCAB}", got, "give one of them")
    if arguments.dataset_impl != "mmap":
        yield Problem("--dataset-impl", "must be mmap", arguments.dataset_impl, "leave it out: the engines read mmap")
    for name in ("workers", "log_interval"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            yield Problem(f"--{name.replace('_', '-')}", "must be at least 1", str(value), "raise it, or leave it out")
    yield from rejects_problems(arguments.on_error, arguments.rejects)
    if arguments.resume and "-" in arguments.input:
        yield Problem("--resume", "cannot go on with standard input", "", "begin anew: leave --resume out")


def _kind(arguments: argparse.Namespace, name: str) -> Kind:
    if arguments.input_format != "auto":
        return Kind(arguments.input_format)
    return kind_of_name(name, Kind.TEXT if arguments.tokenizer_type == _VOCAB else Kind.JSONL)


def _encoder(arguments: argparse.Namespace, workers: int) -> tuple[Encoder, list[str]]:
    """The tokenizer that the flags name, and what the user should know about it."""
    if arguments.tokenizer_type == _VOCAB:
        return Vocabulary(arguments.vocab_file), []
    notes: list[str] = []
    tokenizer = open_tokenizer(arguments.vocab_file, arguments.merge_file)
    if arguments.merge_file is not None:
        notes += _left_out(arguments.merge_file)
    if arguments.encoder == "reference":
        return Reference(tokenizer), notes
    encoder, why = fastest(tokenizer, workers)
    return encoder, notes + [why] * bool(why)


def _left_out(merge_file: Path) -> Iterator[str]:
    """What Megatron does not read of a merges.txt, and so neither do we, where it may well be a merge."""
    text = merge_file.read_text(encoding="utf-8")
    if not text.startswith("#"):
        yield f"{merge_file}: the first line is left out, as Megatron does, though it is no comment"
    if not text.endswith("\n"):
        yield f"{merge_file}: the last line is left out, as Megatron does: no newline ends it"
