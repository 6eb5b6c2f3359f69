"""Real text that every machine has: the sources of Python's standard library; and the demo's data made of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.contracts.run_folder import write_atomic
from tridock.data.dataset.indexed_dataset import bin_path, idx_path, token_dtype
from tridock.data.dataset.manifest import read_manifest
from tridock.errors import Problem, RequestError, TridockError

Report = Callable[[str], None]

_SKIPPED_FOLDERS: Final = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled", "turtledemo"}
)
CORPUS_BYTES: Final = 6_000_000
"""The demo takes documents up to this size in all: about half of the standard library, seconds instead of minutes."""
_RECIPE: Final = 1
"""Raised when the same Python would give other data: what lies there is then made anew."""
_RECEIPT: Final = "demo.json"


def standard_library_sources(folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """Relative path and text of each source file, tests and installed packages left out, undecodable files too.

    The order is that of the paths' hashes: the same everywhere, and every part of the library is spread over all of it,
    so that the documents held out for validation resemble the others.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        paths += [Path(parent, name).relative_to(root) for name in files if name.endswith(".py")]
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.as_posix().encode()).hexdigest()):
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield path.as_posix(), text


def collect_corpus(limit: int = CORPUS_BYTES, folder: Path | None = None) -> list[str]:
    """The documents of the demo: sources in order until ``limit`` bytes are reached."""
    texts: list[str] = []
    size = 0
    for _, text in standard_library_sources(folder):
        texts.append(text)
        size += len(text.encode())
        if size >= limit:
            break
    if not texts:
        root = folder or Path(sysconfig.get_path("stdlib"))
        todo = "use a Python that carries its standard library as source files"
        raise RequestError(Problem(str(root), "holds no Python sources to train on", "", todo))
    return texts


@dataclass(frozen=True, slots=True)
class DemoData:
    """Where the demo's data lies. ``prefix`` is what ``data.data_path`` names."""

    prefix: Path
    tokenizer: Path
    documents: int
    tokens: int
    vocab_size: int
    made: bool
    """Whether it was made now; False where it lay there already."""


def prepare_demo(
    folder: Path, vocab_size: int = 4096, report: Report = print, corpus_bytes: int = CORPUS_BYTES
) -> DemoData:
    """Corpus, tokenizer and indexed data set of the demo in ``folder``; quick where they lie there already.

    Leaves ``stdlib.jsonl``, ``tokenizer/`` and ``stdlib_text_document.bin/.idx/.json``. ``report`` gets a line
    for each step.
    """
    prefix = folder / "stdlib_text_document"
    wanted = {"recipe": _RECIPE, "python": platform.python_version(), "vocab_size": vocab_size, "limit": corpus_bytes}
    if (found := _existing(folder, prefix, wanted)) is not None:
        report(f"data: {found.tokens:,} tokens of {found.documents:,} documents lie ready in {folder}")
        return found

    # The tokenizer library and the progress bar are imported only when there is work for them.
    from tridock.data.input.sources import Kind, find_sources
    from tridock.data.preprocess import Request, preprocess
    from tridock.data.progress import progress_bar
    from tridock.data.tokenize.blocks import Recipe
    from tridock.data.tokenize.encoders import Reference
    from tridock.data.tokenize.tokenizer import BytePairTokenizer

    started = time.monotonic()
    texts = collect_corpus(corpus_bytes)
    size = sum(len(text.encode()) for text in texts)
    report(f"corpus: {len(texts):,} source files of Python {wanted['python']}'s standard library, {size / 1e6:.1f} MB")
    source = folder / "stdlib.jsonl"
    write_atomic(source, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    tokenizer = BytePairTokenizer.train(texts, vocab_size)
    tokenizer.save(folder / "tokenizer")
    report(f"tokenizer: {tokenizer.vocab_size:,} tokens, byte-level BPE, after {time.monotonic() - started:.1f} s")
    with progress_bar("tokenizing") as progress:
        recipe = Recipe(Reference(tokenizer), ("text",), append_eod=True)
        sources = find_sources([str(source)], Kind.JSONL)
        done = preprocess(Request(sources, folder / "stdlib", recipe), progress)
    report(f"data: {done}")
    write_atomic(folder / _RECEIPT, (json.dumps(wanted, indent=2) + "\n").encode())
    return DemoData(prefix, folder / "tokenizer", done.documents_out, done.tokens, tokenizer.vocab_size, made=True)


def _existing(folder: Path, prefix: Path, wanted: dict[str, object]) -> DemoData | None:
    """What lies there, if it was made as ``wanted`` and is all there.

    Any Python's library serves: the container's is not that of the machine around it, and the data that one has made
    must not change under a run of the other.
    """
    try:
        if json.loads((folder / _RECEIPT).read_text()) | {"python": wanted["python"]} != wanted:
            return None
        manifest = read_manifest(prefix)
        width = bin_path(prefix).stat().st_size
    except (OSError, ValueError, TypeError, TridockError):
        return None
    if manifest is None or not idx_path(prefix).is_file():
        return None
    if width != token_dtype(manifest.vocab_size).itemsize * manifest.tokens:
        return None
    return DemoData(prefix, folder / "tokenizer", manifest.documents, manifest.tokens, manifest.vocab_size, made=False)
