"""``tridock data preprocess`` and ``tridock data train-tokenizer``: options to a request, and what is printed."""

from __future__ import annotations

import argparse
import gc
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.cli import megatron_options
from tridock.cli.options import Arguments, Commands, add_command, named_path
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.input.sources import Source
    from tridock.data.tokenize.encoders import Encoder

_HUGGING_FACE: Final = "HuggingFaceTokenizer"
_SENTENCE_PIECE: Final = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_TIKTOKEN: Final = "TikTokenizer"
_NULL: Final = "NullTokenizer"
_VOCAB: Final = "vocab"
_NAMED_BY: Final = {
    "GPT2BPETokenizer": "--vocab-file",
    _HUGGING_FACE: "--tokenizer-model",
    **dict.fromkeys((*_SENTENCE_PIECE, _TIKTOKEN), "--tokenizer-model"),
    _NULL: "--vocab-size",
    _VOCAB: "--vocab-file",
}
"""The option that names the tokenizer, by tokenizer type: Megatron's types and Tridock's own."""
_OF_TYPES: Final = {
    "--vocab-file": ("GPT2BPETokenizer", _VOCAB),
    "--tokenizer-model": (_HUGGING_FACE, *_SENTENCE_PIECE, _TIKTOKEN),
    "--vocab-size": (_TIKTOKEN, _NULL),
    "--tiktoken-pattern": (_TIKTOKEN,),
    "--tiktoken-num-special-tokens": (_TIKTOKEN,),
    "--tokenizer-special-tokens": (_TIKTOKEN,),
    "--null-tokenizer-eod-id": (_NULL,),
    "--tokenizer-hf-no-include-special-tokens": (_HUGGING_FACE,),
}
"""The tokenizer types that an option applies to."""
_ALLOW_SPECIAL: Final = "GPT2BPETokenizer"
"""The only type for which --allow-special has an effect."""
_MOST_TOKENS: Final = 2**31 - 1
"""Token ids are at most int32."""


def add(commands: Commands) -> None:
    _add_preprocess(commands)
    _add_train_tokenizer(commands)


def _add_preprocess(commands: Commands) -> None:
    example = (
        "--input corpus/*.jsonl.zst --output-prefix data/mine --tokenizer-type GPT2BPETokenizer"
        " --vocab-file vocab.json --merge-file merges.txt --append-eod"
    )
    summary = "tokenize texts into Megatron's .bin and .idx files"
    parser = add_command(commands, "preprocess", _preprocess, summary, example)
    texts = parser.add_argument_group("input")
    _add_texts(texts, "JSON keys to tokenize, one data set per key (default: text)")
    tokenizer = parser.add_argument_group("tokenizer")
    text = (
        "GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, TikTokenizer, NullTokenizer (ids as text), or"
        " vocab (words split at white space, ids from a JSON file)"
    )
    tokenizer.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=text)
    text = "vocab.json of GPT-2, or a tokenizer.json"
    tokenizer.add_argument("--vocab-file", type=named_path, metavar="FILE", help=text)
    tokenizer.add_argument("--merge-file", type=named_path, metavar="FILE", help="merges.txt of GPT-2")
    text = "tokenizer model file; for HuggingFaceTokenizer: tokenizer.json, or its folder"
    tokenizer.add_argument("--tokenizer-model", type=named_path, metavar="PATH", help=text)
    text = "vocabulary size of NullTokenizer; of TikTokenizer with special tokens (default: 131072)"
    tokenizer.add_argument("--vocab-size", type=int, metavar="N", help=text)
    text = "TikTokenizer: pattern that splits texts into words (default: v2)"
    tokenizer.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help=text)
    text = "TikTokenizer: ids reserved for special tokens (default: 1000)"
    tokenizer.add_argument("--tiktoken-num-special-tokens", type=int, metavar="N", help=text)
    text = "TikTokenizer: special tokens in the order of their ids (default: <unk> <s> </s> <mask> <pad> <cls> <sep>)"
    names = ("--tokenizer-special-tokens", "--tiktoken-special-tokens")
    tokenizer.add_argument(*names, nargs="+", metavar="TOKEN", help=text)
    text = "HuggingFaceTokenizer: add no token around a text, such as one that begins it"
    option = "--tokenizer-hf-no-include-special-tokens"
    tokenizer.add_argument(option, action="store_const", const=True, help=text)
    text = "NullTokenizer: id of the end-of-document token (default: the last)"
    tokenizer.add_argument("--null-tokenizer-eod-id", type=int, metavar="ID", help=text)
    text = "append the end-of-document token to every document: <|endoftext|>, eos_token or </s>"
    tokenizer.add_argument("--append-eod", action="store_true", help=text)
    text = "read <|endoftext|> and other special tokens in texts as tokens, as today's Megatron does"
    tokenizer.add_argument("--allow-special", action="store_true", help=text)
    text = "no effect: the fast encoder is used where it supports the tokenizer"
    tokenizer.add_argument("--use-gigatoken", action="store_true", help=text)
    text = "reference: use only Hugging Face's tokenizers, never the faster library (default: auto)"
    tokenizer.add_argument("--encoder", choices=["auto", "reference"], default="auto", help=text)
    output = parser.add_argument_group("output")
    text = "write PREFIX_<key>_document.bin, .idx and .json"
    output.add_argument("--output-prefix", type=named_path, required=True, metavar="PREFIX", help=text)
    text = "format of the data set; only mmap is supported (default: mmap)"
    output.add_argument("--dataset-impl", default="mmap", metavar="FORMAT", help=text)
    _add_rejects(output)
    run = parser.add_argument_group("run")
    run.add_argument("--workers", type=int, metavar="N", help="number of processes (default: one per core)")
    text = "print progress every N documents if standard error is not a terminal"
    run.add_argument("--log-interval", type=int, metavar="N", help=text)
    run.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_quiet()
    megatron_options.add(parser)


def _add_train_tokenizer(commands: Commands) -> None:
    example = "--input corpus --vocab-size 32000 --output data/tokenizer"
    parser = add_command(commands, "train-tokenizer", _train_tokenizer, "train a byte-level BPE tokenizer", example)
    _add_texts(parser.add_argument_group("input"), "JSON keys to read (default: text)")
    output = parser.add_argument_group("output")
    text = "vocabulary size, including the 256 bytes and <|endoftext|>"
    output.add_argument("--vocab-size", type=int, required=True, metavar="N", help=text)
    text = "folder for tokenizer.json, vocab.json and merges.txt"
    output.add_argument("--output", type=named_path, required=True, metavar="DIR", help=text)
    _add_rejects(output)
    parser.add_quiet()


def _add_texts(group: argparse._ArgumentGroup, keys: str) -> None:
    text = "files, folders, glob patterns or URLs, or - for standard input; gzip, bz2, xz and zstd are decompressed"
    group.add_argument("--input", nargs="+", required=True, help=text)
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys)
    text = "jsonl: a JSON object per line; text: a document per line; csv, tsv: with a header (default: auto, by name)"
    group.add_argument("--input-format", choices=["auto", "jsonl", "text", "csv", "tsv"], default="auto", help=text)
    text = "what a document is: a line or row, or a whole file (default: line)"
    group.add_argument("--documents", choices=["line", "file"], default="line", help=text)


def _add_rejects(group: argparse._ArgumentGroup) -> None:
    text = "what to do with an invalid line (default: stop)"
    group.add_argument("--on-error", choices=["stop", "skip"], default="stop", help=text)
    group.add_argument(
        "--rejects", type=named_path, metavar="FILE", help="write skipped lines to FILE, each with the reason"
    )
    text = "largest share of skipped lines, from 0 to 1 (default: 0.5)"
    group.add_argument("--max-rejects", type=float, default=0.5, metavar="SHARE", help=text)


def _preprocess(arguments: Arguments) -> int:
    """Tokenize texts into Megatron's .bin and .idx files. Takes the options of Megatron's preprocess_data.py."""
    from tridock.data.dataset.prefixes import check_outputs
    from tridock.data.preprocess import Request, preprocess
    from tridock.data.progress import progress_bar
    from tridock.data.resumable_build import build_folder
    from tridock.data.tokenize.blocks import Recipe
    from tridock.data.tokenize.encoders import check_ids_fit
    from tridock.data.tokenize.memory import limit_free_memory

    RequestError.raise_for(_preprocess_problems(arguments))
    limit_free_memory()
    sources = _find_sources(arguments, "text" if arguments.tokenizer_type == _VOCAB else "jsonl")
    workers = arguments.workers or len(os.sched_getaffinity(0))
    gc.disable()  # among the 800,000 objects of a large vocabulary, collections take a second
    encoder, notes = _open_encoder(arguments, workers)
    gc.freeze()  # in a forked worker, a collection would copy the pages of 100,000 small objects
    gc.enable()
    check_ids_fit(encoder, str(_tokenizer_file(arguments) or "--vocab-size"))
    notes += _options_without_effect(arguments)
    for note in notes:
        print(note, file=sys.stderr)
    request = Request(
        sources=sources,
        output_prefix=arguments.output_prefix,
        recipe=Recipe(encoder, tuple(dict.fromkeys(arguments.json_keys)), arguments.append_eod),
        level="sentence" if arguments.tokenizer_type == _VOCAB else "document",
        workers=workers,
        rejects=arguments.rejects,
        max_rejects=arguments.max_rejects,
        resume=arguments.resume,
    )
    read = [*_tokenizer_files(arguments), *[source.path for source in sources if source.path is not None]]
    check_outputs(request.outputs, read, build_folder(request.output_prefix))
    try:
        with progress_bar("tokenizing", arguments.log_interval, quiet=arguments.quiet) as progress:
            done = preprocess(request, progress)
    except BaseException:
        if (folder := build_folder(request.output_prefix)).exists():
            print(f"{folder}: holds the work so far; continue it with --resume", file=sys.stderr)
        raise
    print(done)
    return 0


def _train_tokenizer(arguments: Arguments) -> int:
    """Train a byte-level BPE tokenizer on texts. Writes tokenizer.json, and GPT-2's vocab.json and merges.txt."""
    from tridock.data.dataset.prefixes import check_outputs
    from tridock.data.progress import progress_bar
    from tridock.data.tokenize.train import Request, train_tokenizer

    RequestError.raise_for(_tokenizer_problems(arguments))
    request = Request(
        sources=_find_sources(arguments, "jsonl"),
        keys=tuple(dict.fromkeys(arguments.json_keys)),
        vocab_size=arguments.vocab_size,
        output=arguments.output,
        rejects=arguments.rejects,
        max_rejects=arguments.max_rejects,
    )
    check_outputs(request.outputs, [source.path for source in request.sources if source.path is not None])
    steps = (lambda _: None) if arguments.quiet else (lambda line: print(line, file=sys.stderr))
    with progress_bar("reading", quiet=arguments.quiet) as progress:
        done = train_tokenizer(request, progress, steps)
    print(done)
    return 0


def _find_sources(arguments: Arguments, default: str) -> tuple[Source, ...]:
    """Returns the inputs; ``default`` is the format of files whose name does not determine it."""
    from tridock.data.input.files import find_sources, repeated
    from tridock.data.input.sources import Kind

    kind = None if arguments.input_format == "auto" else Kind(arguments.input_format)
    if arguments.documents == "file":
        if kind is not None:
            todo = "leave one of them out"
            raise RequestError(Problem("--documents file", "does not go with --input-format", str(kind), todo))
        kind = Kind.FILE
    sources = find_sources(arguments.input, kind, Kind(default), lambda note: print(note, file=sys.stderr))
    texts = [source.name for source in sources if source.kind in (Kind.TEXT, Kind.FILE)]
    if texts and len(keys := dict.fromkeys(arguments.json_keys)) > 1:
        what, todo = f"names {len(keys)} keys, but {texts[0]} is text", "name one, or add --input-format jsonl"
        raise RequestError(Problem("--json-keys", what, " ".join(keys), todo))
    if arguments.input_format == "auto" and (found := _looks_like_json(sources)):
        print(
            f"{found}: is read as text, but begins with a JSON object; for JSON lines add --input-format jsonl",
            file=sys.stderr,
        )
    if twice := repeated(sources):
        (source, before), *others = twice
        more = f" ({len(others)} more inputs are repeated too)" if others else ""
        print(f"{source.name}: is read twice: it is the same file as {before.name}{more}", file=sys.stderr)
    return sources


def _looks_like_json(sources: tuple[Source, ...]) -> str | None:
    """Returns the name of the first text file whose first line is a JSON object."""
    from tridock.data.input.documents import is_object
    from tridock.data.input.sources import Kind, first_line

    for source in sources:
        if source.kind is Kind.TEXT and is_object(first_line(source)):
            return source.name
    return None


def _preprocess_problems(arguments: Arguments) -> Iterator[Problem]:
    from tridock.data.dataset.prefixes import output_problems
    from tridock.data.input.documents import rejects_problems
    from tridock.data.input.remote import is_url

    yield from output_problems(arguments.output_prefix)
    for key in arguments.json_keys:
        if "/" in key:
            yield Problem("--json-keys", "contains a /, which a file name cannot have", key, "rename the key")
    yield from megatron_options.problems(arguments)
    yield from _type_problems(arguments)
    if arguments.tokenizer_type == _HUGGING_FACE and arguments.tokenizer_model is not None:
        yield from _model_problems(arguments.tokenizer_model)
    if arguments.dataset_impl != "mmap":
        yield Problem("--dataset-impl", "must be mmap", arguments.dataset_impl, "leave it out: the engines read mmap")
    for name in ("workers", "log_interval"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            yield Problem(f"--{name.replace('_', '-')}", "must be at least 1", str(value), "raise it, or leave it out")
    yield from rejects_problems(arguments.on_error, arguments.rejects, arguments.max_rejects)
    if arguments.resume and any(it == "-" or is_url(it) for it in arguments.input):
        todo = "leave --resume out and start from the beginning"
        yield Problem("--resume", "cannot continue with standard input or a URL", "", todo)


def _type_problems(arguments: Arguments) -> Iterator[Problem]:
    from tridock.data.tokenize.tiktoken import SPECIAL_TOKENS

    kind = arguments.tokenizer_type
    if kind not in _NAMED_BY:
        *types, last = _NAMED_BY
        yield Problem("--tokenizer-type", f"must be {', '.join(types)} or {last}", kind, "give one of them")
        return
    own = _NAMED_BY[kind]
    if _value(arguments, own) is None:
        yield Problem(own, f"is required with --tokenizer-type {kind}", "", "name the tokenizer")
    for option, kinds in _OF_TYPES.items():
        if kind not in kinds and (got := _value(arguments, option)) is not None:
            got = " ".join(got) if isinstance(got, list) else "" if got is True else str(got)
            yield Problem(option, f"does not go with --tokenizer-type {kind}", got, f"leave it out, and give {own}")
    size = arguments.vocab_size
    if size is not None and not 1 <= size <= _MOST_TOKENS:
        yield Problem("--vocab-size", f"must be at least 1 and at most {_MOST_TOKENS}", str(size), "change it")
        return
    end = arguments.null_tokenizer_eod_id
    if kind == _NULL and size is not None and end is not None and not 0 <= end < size:
        yield Problem("--null-tokenizer-eod-id", f"must be an id below {size}", str(end), "change it, or leave it out")
    if kind == _TIKTOKEN:
        _, special, kept, most = _of_tiktoken(arguments)
        if not len(special) <= kept < most:
            what = f"must be at least {len(special)}, the special tokens, and below the vocabulary's {most}"
            yield Problem("--tiktoken-num-special-tokens", what, str(kept), "change it")
        if len(set(special)) < len(special) or not set(SPECIAL_TOKENS) <= set(special):
            what = f"must be {', '.join(SPECIAL_TOKENS)}, and then your own, each once"
            yield Problem("--tokenizer-special-tokens", what, " ".join(special), "name them all")


def _model_problems(model: Path) -> Iterator[Problem]:
    """Yields a problem if ``--tokenizer-model`` is a name on the hub, or a folder without ``tokenizer.json``."""
    from tridock.contracts.tokenizers import GPT2_FILES, SENTENCE_PIECE, TOKENIZER

    if not model.exists() and re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", str(model)) and model.suffix != ".json":
        included = ("--include", "*token*", *GPT2_FILES)
        command = shlex.join(("hf", "download", str(model), *included, "--local-dir", model.name))
        what, todo = "is not here, and nothing is downloaded", f"{command}, and name that folder"
        yield Problem("--tokenizer-model", what, str(model), todo)
    elif model.is_dir() and not (model / TOKENIZER).exists():
        todo = (
            "save it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW); or name its files:"
            f" --tokenizer-type GPT2BPETokenizer with --vocab-file {GPT2_FILES[0]} and --merge-file {GPT2_FILES[1]},"
            f" {_SENTENCE_PIECE[0]} or {_TIKTOKEN} with --tokenizer-model {SENTENCE_PIECE}"
        )
        yield Problem(str(model), f"has no {TOKENIZER}", "", todo)


def _of_tiktoken(arguments: Arguments) -> tuple[str, Sequence[str], int, int]:
    """Returns the pattern, the special tokens, the number of ids reserved for them, and the total number of ids."""
    from tridock.data.tokenize.tiktoken import SPECIAL_IDS, SPECIAL_TOKENS, VOCAB_SIZE

    kept = arguments.tiktoken_num_special_tokens
    return (
        arguments.tiktoken_pattern or "v2",
        arguments.tokenizer_special_tokens or SPECIAL_TOKENS,
        SPECIAL_IDS if kept is None else kept,
        arguments.vocab_size or VOCAB_SIZE,
    )


def _value(arguments: Arguments, option: str) -> object:
    return getattr(arguments, option.removeprefix("--").replace("-", "_"))


def _tokenizer_file(arguments: Arguments) -> Path | None:
    """Returns the tokenizer's file, for which Megatron has two options; None if it is not a file."""
    file = _value(arguments, _NAMED_BY[arguments.tokenizer_type])
    return file if isinstance(file, Path) else None


def _tokenizer_files(arguments: Arguments) -> list[Path]:
    """Returns all files that the tokenizer is read from; one that is optional may be missing."""
    from tridock.contracts.tokenizers import GPT2_FILES, TOKENIZER, files_of

    file = _tokenizer_file(arguments)
    if file is not None and arguments.tokenizer_type == _HUGGING_FACE:
        return files_of(file)
    inside = [file / name for name in (TOKENIZER, *GPT2_FILES)] if file is not None and file.is_dir() else [file]
    return [each for each in (*inside, arguments.merge_file) if each is not None]


def _tokenizer_problems(arguments: Arguments) -> Iterator[Problem]:
    from tridock.data.input.documents import rejects_problems
    from tridock.data.tokenize.tokenizer import END_OF_TEXT, SMALLEST_VOCABULARY

    size = arguments.vocab_size
    if size < SMALLEST_VOCABULARY:
        what = f"must be at least {SMALLEST_VOCABULARY}: every byte and {END_OF_TEXT}"
        yield Problem("--vocab-size", what, str(size), "raise it")
    if size > _MOST_TOKENS:
        yield Problem("--vocab-size", f"must be at most {_MOST_TOKENS}: token ids are int32", str(size), "lower it")
    if arguments.output.exists() and not arguments.output.is_dir():
        yield Problem("--output", "is not a folder", str(arguments.output), "name a folder")
    yield from rejects_problems(arguments.on_error, arguments.rejects, arguments.max_rejects)


def _open_encoder(arguments: Arguments, workers: int) -> tuple[Encoder, list[str]]:
    from tridock.data.tokenize.encoders import Reference, fastest
    from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
    from tridock.data.tokenize.sentencepiece import SentencePieceTokenizer
    from tridock.data.tokenize.tiktoken import TikTokenizer
    from tridock.data.tokenize.tokenizer import open_tokenizer
    from tridock.data.tokenize.words import Null, Vocabulary

    kind, model = arguments.tokenizer_type, arguments.tokenizer_model
    if kind in _SENTENCE_PIECE:
        return SentencePieceTokenizer(model, arguments.append_eod), []
    if kind == _TIKTOKEN:
        own = [option for option, kinds in _OF_TYPES.items() if kinds[0] == kind]
        given = [option for option in own if _value(arguments, option) is not None]
        return TikTokenizer(model, *_of_tiktoken(arguments), given=given), []
    if kind == _NULL:
        return Null(arguments.vocab_size, arguments.null_tokenizer_eod_id), []
    if kind == _VOCAB:
        return Vocabulary(arguments.vocab_file), []
    reference: HuggingFaceTokenizer | Reference
    if kind == _HUGGING_FACE:
        around = arguments.tokenizer_hf_no_include_special_tokens is None
        reference = HuggingFaceTokenizer(model, needs_end=arguments.append_eod, around=around)
    else:
        tokenizer = open_tokenizer(arguments.vocab_file, arguments.merge_file, arguments.append_eod)
        if arguments.allow_special:
            tokenizer.accept_special()
        reference = Reference(tokenizer)
    if arguments.encoder == "reference":
        return reference, []
    encoder, why = fastest(reference, workers)
    return encoder, [why] * bool(why)


def _options_without_effect(arguments: Arguments) -> Iterator[str]:
    """Yields a note for each Megatron option that has no effect here."""
    yield from megatron_options.notes(arguments)
    if arguments.use_gigatoken and arguments.encoder == "reference":
        yield "--use-gigatoken: has no effect with --encoder reference"
    if arguments.allow_special and arguments.tokenizer_type != _ALLOW_SPECIAL:
        yield f"--allow-special: has no effect with --tokenizer-type {arguments.tokenizer_type}"
