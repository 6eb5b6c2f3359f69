"""JSON lines to ``<prefix>_text_document.bin/.idx`` and a manifest: Megatron's ``tools/preprocess_data.py``, first cut.

Nothing is skipped: a line that cannot be used stops the work before any output appears.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tridock.data.indexed_dataset import IndexedDatasetWriter
from tridock.data.manifest import DatasetManifest, Input, manifest_path, write_manifest
from tridock.data.tokenizer import BytePairTokenizer
from tridock.errors import Problem, RequestError

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Preprocessed:
    """What came out. ``str()`` is the line for the user."""

    prefix: Path
    documents_in: int
    documents_out: int
    tokens: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.prefix}: {self.documents_in:,} documents in, {self.documents_out:,} out, {self.tokens:,} tokens, "
            f"{self.bytes / 1e6:,.1f} MB in {self.seconds:.1f} s ({rate:.1f} MB/s)"
        )


def preprocess(
    source: Path,
    output_prefix: Path,
    tokenizer: BytePairTokenizer,
    *,
    json_key: str = "text",
    append_eod: bool = False,
    progress: Progress | None = None,
) -> Preprocessed:
    """Tokenizes ``source`` (one JSON object a line) into ``<output_prefix>_<json_key>_document.bin/.idx/.json``.

    ``append_eod`` closes every document that is not empty with the end-of-text id. Raises :class:`RequestError`
    with file and line for the first line that is not a JSON object with text under ``json_key``.
    """
    started = time.monotonic()
    prefix = output_prefix.with_name(f"{output_prefix.name}_{json_key}_document")
    total = _size(source)
    digest = hashlib.sha256()
    done = documents = 0
    closing = [tokenizer.end_of_text] if append_eod else []
    with IndexedDatasetWriter(prefix, tokenizer.vocab_size) as writer:
        for texts, raw in _batches(source, json_key):
            for ids in tokenizer.encode_batch(texts):
                writer.add_document(ids + closing if ids else ids)
            digest.update(raw)
            done += len(raw)
            documents += len(texts)
            if progress is not None:
                progress(done, total)
        # A manifest of earlier data must not stand beside the new.
        manifest_path(prefix).unlink(missing_ok=True)
    write_manifest(
        prefix,
        DatasetManifest(
            vocab_size=tokenizer.vocab_size,
            documents=writer.documents,
            tokens=writer.tokens,
            tokenizer_sha256=tokenizer.sha256,
            end_of_document=tokenizer.end_of_text if append_eod else None,
            inputs=(Input(name=source.name, bytes=done, sha256=digest.hexdigest()),),
        ),
    )
    return Preprocessed(prefix, documents, writer.documents, writer.tokens, done, time.monotonic() - started)


def _size(source: Path) -> int:
    try:
        return source.stat().st_size
    except OSError as error:
        got = error.strerror or str(error)
        raise RequestError(Problem(str(source), "cannot be read", got, "give a file of JSON lines")) from None


def _batches(source: Path, key: str) -> Iterator[tuple[list[str], bytes]]:
    """The texts of about a megabyte of lines at a time, with the bytes that they came from."""
    texts: list[str] = []
    raw = bytearray()
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                texts.append(_text_of(line, key, f"{source}:{number}"))
                raw += line
                if len(raw) >= _BATCH_BYTES:
                    yield texts, bytes(raw)
                    texts, raw = [], bytearray()
    except OSError as error:
        got = error.strerror or str(error)
        raise RequestError(Problem(str(source), "cannot be read", got, "give a file of JSON lines")) from None
    if texts:
        yield texts, bytes(raw)


def _text_of(line: bytes, key: str, where: str) -> str:
    todo = f'mend or remove the line; each is one object such as {{"{key}": "…"}}'
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        got = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise RequestError(Problem(where, "is not UTF-8", got, todo)) from None
    except ValueError as error:
        raise RequestError(Problem(where, "is not valid JSON", str(error), todo)) from None
    if not isinstance(fields, dict):
        raise RequestError(Problem(where, "is not a JSON object", _shown(fields), todo))
    if key not in fields:
        got = f"the keys {', '.join(sorted(fields)) or '(none)'}"
        raise RequestError(Problem(where, f"has no key {key!r}", got, todo))
    text = fields[key]
    if not isinstance(text, str):
        raise RequestError(Problem(where, f"has no text under {key!r}", _shown(text), todo))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"U+{ord(text[error.start]):04X} at character {error.start + 1}"
        raise RequestError(Problem(where, "holds half of a surrogate pair, which is no character", got, todo)) from None
    return text


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
