"""Tokenizes texts into ``<prefix>_<key>_document.bin/.idx`` and a manifest; the bytes equal those of Megatron's tool.

Every document of the inputs is in the output, in the order of the inputs, or is a rejected line. The bytes depend
neither on the number of workers nor on interruptions.
"""

import hashlib
import platform
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final

from tridock import __version__
from tridock.data.dataset.indexed_dataset import bin_path, idx_path, token_dtype
from tridock.data.dataset.manifest import DatasetManifest, manifest_path, write_manifest
from tridock.data.digest import sha256_of
from tridock.data.input.documents import Rejection, check_share, form_of
from tridock.data.input.sources import Chunk, Source, read_chunks
from tridock.data.progress import Done, Progress
from tridock.data.resumable_build import Finished, ResumableBuild
from tridock.data.tokenize.blocks import Encoded, Recipe
from tridock.data.tokenize.workers import encode_in_order
from tridock.errors import Problem, RequestError, reason_of

CHUNK_BYTES: Final = 2 << 20
_LISTED: Final = 20
"""Maximum number of inputs that a run's facts list by name."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a run. Without ``rejects`` the first invalid line stops it.

    ``journal_seconds`` is the time between two saves of the journal, from which ``resume`` continues.
    """

    sources: tuple[Source, ...]
    output_prefix: Path
    recipe: Recipe
    level: str = "document"
    workers: int = 1
    rejects: Path | None = None
    max_rejects: float = 1
    resume: bool = False
    chunk_bytes: int = CHUNK_BYTES
    journal_seconds: float = 15

    @property
    def prefixes(self) -> tuple[Path, ...]:
        prefix = self.output_prefix
        return tuple(prefix.with_name(f"{prefix.name}_{key}_{self.level}") for key in self.recipe.keys)

    @property
    def outputs(self) -> list[tuple[str, Path]]:
        """The files that a run writes, each with the option that names it."""
        paths = [file(prefix) for prefix in self.prefixes for file in (bin_path, idx_path, manifest_path)]
        rejects = [] if self.rejects is None else [("--rejects", self.rejects)]
        return [*[("--output-prefix", path) for path in paths], *rejects]

    def facts(self) -> dict[str, str]:
        """Everything that the output depends on; a run resumes only with the same facts."""
        return {
            "inputs": _listed([f"{source.name} ({source.kind}, {source.bytes} bytes)" for source in self.sources]),
            "keys": " ".join(self.recipe.keys),
            "tokenizer": f"{self.recipe.encoder.sha256} {self.recipe.encoder.vocab_size}",
            # An encoder with wrong ids may have been wrong before, so another encoder must not continue its output.
            "encoder": self.recipe.encoder.name,
            "allow-special": str(self.recipe.encoder.accepts_special),
            "append-eod": str(self.recipe.append_eod),
            "end-of-document": str(self.recipe.encoder.end_of_document),
            "level": self.level,
            "on-error": "stop" if self.rejects is None else "skip",
        }


def _listed(inputs: list[str]) -> str:
    if len(inputs) <= _LISTED:
        return ", ".join(inputs)
    digest = hashlib.sha256("\0".join(inputs).encode(errors="surrogateescape")).hexdigest()
    return f"{len(inputs)} files (SHA-256 of names, formats and sizes: {digest})"


@dataclass(frozen=True, slots=True)
class Preprocessed:
    """The result. ``str()`` is for the user."""

    prefixes: tuple[Path, ...]
    documents_in: int
    documents_out: int
    rejected: int
    empty: int
    tokens: int
    bytes: int
    seconds: float

    @property
    def prefix(self) -> Path:
        return self.prefixes[0]

    def __str__(self) -> str:
        rate = self.bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{', '.join(map(str, self.prefixes))}: {self.documents_in:,} documents in, {self.documents_out:,} out"
            f" ({self.empty:,} empty), {self.rejected:,} rejected; {self.tokens:,} tokens,"
            f" {self.bytes / 1e6:,.1f} MB in {self.seconds:.1f} s ({rate:.1f} MB/s)"
        )


def preprocess(request: Request, progress: Progress | None = None) -> Preprocessed:
    """Runs a request. Raises :class:`RequestError` with file and line for an invalid line, unless they are skipped.

    No file gets its final name before all are complete. After an interruption ``resume`` continues from the journal.
    """
    started = time.monotonic()
    dtype = token_dtype(request.recipe.encoder.vocab_size)
    facts = request.facts()
    try:
        with ResumableBuild(request.output_prefix, len(request.recipe.keys), facts, request.resume) as work:
            _check_finished(request.sources, work.finished)
            if not work.journal.whole:
                _work(request, work, dtype.itemsize, progress)
                _check_whole(request, work)
            for prefix in request.prefixes:
                # Removes the manifests of earlier data, which would not match the new data.
                manifest_path(prefix).unlink(missing_ok=True)
            work.publish(request.prefixes, dtype, request.rejects)
            _write_manifests(request, work, dtype.itemsize)
            work.remove()
            journal = work.journal
    except OSError as error:
        todo = "free some space there or choose another --output-prefix, and continue with --resume"
        raise RequestError(Problem(str(request.output_prefix), "cannot be written", reason_of(error), todo)) from None
    return Preprocessed(
        prefixes=request.prefixes,
        documents_in=journal.documents_in,
        documents_out=journal.keys[0].documents,
        rejected=journal.rejected,
        empty=journal.empty,
        tokens=sum(counts.bytes for counts in journal.keys) // dtype.itemsize,
        bytes=journal.finished_bytes,
        seconds=time.monotonic() - started,
    )


def _check_whole(request: Request, work: ResumableBuild) -> None:
    """Raises :class:`RequestError` if too many lines were rejected, or if an input that is not empty gave no token."""
    journal = work.journal
    check_share(journal.documents_in, journal.rejected, request.max_rejects, work.example)
    if journal.finished_bytes and not any(counts.bytes for counts in journal.keys):
        got = f"{journal.documents_in} documents, {journal.empty} of them empty"
        todo = "name the key of the texts with --json-keys, or other files"
        raise RequestError(Problem("--input", "gives no token", got, todo))


def _check_finished(sources: tuple[Source, ...], finished: list[Finished]) -> None:
    """Raises :class:`RequestError` with every input that has changed since an interrupted run finished it."""
    problems = []
    for source, before in zip(sources, finished, strict=False):
        assert source.path is not None  # no journal is saved with standard input
        same = (source.bytes, source.path.stat().st_ctime_ns) == (before.input.bytes, before.changed_ns)
        if not same and not (source.path.is_file() and sha256_of(source.path) == before.input.sha256):
            problems.append(_changed_since(source))
    RequestError.raise_for(problems)


def _changed_since(source: Source) -> Problem:
    todo = "leave --resume out and start from the beginning"
    return Problem(source.name, "has changed since the run started", "", todo)


def _work(request: Request, work: ResumableBuild, width: int, progress: Progress | None) -> None:
    """Reads, encodes and appends the lines that the journal does not cover yet."""
    journal, saved = work.journal, time.monotonic()
    total = 0 if any(source.path is None for source in request.sources) else sum(s.bytes for s in request.sources)
    with closing(encode_in_order(request.recipe, _chunks(request, work), request.workers)) as encoded_chunks:
        for chunk, encoded in encoded_chunks:
            _append(request, work, chunk, encoded)
            if progress is not None:
                tokens = sum(counts.bytes for counts in journal.keys) // width
                read = journal.finished_bytes + (0 if chunk.finished else chunk.position)
                progress(Done(read, total, journal.documents_in, tokens))
            # The end of a damaged file is followed by its facts; resuming between the two is impossible.
            if chunk.broken is None and total and time.monotonic() - saved >= request.journal_seconds:
                journal.digest = chunk.digest.result()
                work.save()
                saved = time.monotonic()
    assert all(journal.documents_in == counts.documents + journal.rejected for counts in journal.keys)


def _chunks(request: Request, work: ResumableBuild) -> Iterator[Chunk]:
    at, offset, digest = work.journal.source, work.journal.offset, work.journal.digest
    for number, source in enumerate(request.sources):
        if number < at:
            continue
        chunks = read_chunks(number, source, request.recipe.keys, request.chunk_bytes)
        yield from _skip_done(chunks, offset, digest) if number == at and offset else chunks


def _skip_done(chunks: Iterator[Chunk], offset: int, digest: str) -> Iterator[Chunk]:
    """Yields the chunks after ``offset``, if the bytes before it are unchanged."""
    seen = hashlib.sha256()
    for chunk in chunks:
        begin = chunk.offset - len(chunk.data)
        cut = min(max(offset - begin, 0), len(chunk.data))
        seen.update(chunk.data[:cut])
        reached = chunk.offset >= offset
        if (reached and begin < offset and seen.hexdigest() != digest) or (chunk.finished and not reached):
            raise RequestError(_changed_since(chunk.source))
        if cut and cut == len(chunk.data):
            continue
        lines = chunk.data.count(b"\n", 0, cut)
        yield replace(chunk, data=chunk.data[cut:], first_line=chunk.first_line + lines, lines=chunk.lines - lines)


def _append(request: Request, work: ResumableBuild, chunk: Chunk, encoded: Encoded | None) -> None:
    journal, form = work.journal, form_of(request.recipe.keys, chunk.source.kind)
    if encoded is not None:
        for rejection in encoded.rejected_lines:
            problem = rejection.problem(chunk.source.name, chunk.first_line, form)
            if request.rejects is None:
                raise RequestError(problem)
            work.example = work.example or problem
            work.reject(rejection.record(chunk.source.name, chunk.first_line))
        for number, block in enumerate(encoded.blocks):
            work.add(number, block)
        journal.empty += encoded.empty
        journal.documents_in += chunk.lines
    if chunk.broken is not None:
        if request.rejects is None:
            raise RequestError(chunk.broken)
        cut_off = Rejection(0, chunk.broken.what, chunk.broken.got, chunk.data)
        work.reject(cut_off.record(chunk.source.name, chunk.first_line))
        journal.documents_in += 1
    journal.source, journal.offset = chunk.number, chunk.offset
    if chunk.finished is not None:
        work.finish(Finished(input=chunk.finished, changed_ns=chunk.changed_ns))
        journal.source, journal.offset = chunk.number + 1, 0


def _write_manifests(request: Request, work: ResumableBuild, width: int) -> None:
    encoder, journal = request.recipe.encoder, work.journal
    closed = request.recipe.append_eod or encoder.always_closed
    for key, prefix, counts in zip(request.recipe.keys, request.prefixes, journal.keys, strict=True):
        manifest = DatasetManifest(
            vocab_size=max(encoder.vocab_size, encoder.largest_id + 1),
            documents=counts.documents,
            tokens=counts.bytes // width,
            tokenizer_sha256=encoder.sha256,
            end_of_document=encoder.end_of_document if closed else None,
            inputs=tuple(it.input for it in work.finished),
            json_key=key,
            sequences=counts.sequences,
            rejected=journal.rejected,
            versions=_versions(encoder.name),
            bin_sha256=counts.bin_sha256,
            idx_sha256=counts.idx_sha256,
        )
        write_manifest(prefix, manifest)


def _versions(encoder: str) -> dict[str, str]:
    found = {"tridock": __version__, "python": platform.python_version()}
    for name in dict.fromkeys(("numpy", "tokenizers", encoder)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
