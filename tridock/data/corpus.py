"""The demo data set, built from the source files of Python's standard library, which every machine has."""

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
"""Total size of the documents: about half of the standard library, which takes seconds instead of minutes."""
_RECIPE: Final = 2
"""Increase it when a change here gives other data from the same Python; existing data is then rebuilt."""
_RECEIPT: Final = "demo.json"


def standard_library_sources(folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields relative path and text of each source file, without tests, installed packages and undecodable files.

    Files are sorted by the hashes of their paths: the order is the same everywhere, and the validation documents
    resemble the others.
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
    """Returns the documents of the demo: source files in order, up to ``limit`` bytes."""
    texts: list[str] = []
    size = 0
    for _, text in standard_library_sources(folder):
        texts.append(text)
        size += len(text.encode())
        if size >= limit:
            break
    if not texts:
        root = folder or Path(sysconfig.get_path("stdlib"))
        todo = "use a Python that has its standard library as source files"
        raise RequestError(Problem(str(root), "contains no Python sources to train on", "", todo))
    return texts


@dataclass(frozen=True, slots=True)
class DemoData:
    """The demo data set. ``prefix`` is the value for ``data.data_path``."""

    prefix: Path
    tokenizer: Path
    documents: int
    tokens: int
    vocab_size: int
    made: bool
    """Whether this call built it, rather than found it."""


def prepare_demo(
    folder: Path, vocab_size: int = 4096, report: Report = print, corpus_bytes: int = CORPUS_BYTES
) -> DemoData:
    """Builds corpus, tokenizer and data set of the demo in ``folder``, unless they exist.

    Writes ``stdlib.jsonl``, ``tokenizer/`` and ``stdlib_text_document.bin/.idx/.json``. Calls ``report`` with a line
    per step.
    """
    prefix = folder / "stdlib_text_document"
    wanted = {"recipe": _RECIPE, "python": platform.python_version(), "vocab_size": vocab_size, "limit": corpus_bytes}
    if (found := _existing(folder, prefix, wanted)) is not None:
        report(f"data: {found.tokens:,} tokens of {found.documents:,} documents are already in {folder}")
        return found

    # Heavy imports only if there is something to build.
    from tridock.data.input.files import find_sources
    from tridock.data.input.sources import Kind
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
    """Returns the existing data set if it is complete and was built as ``wanted``, by any version of Python.

    The container's Python differs from the host's, and one must not replace data that a run of the other reads.
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
