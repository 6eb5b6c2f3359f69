"""``tridock data train-tokenizer``: trains a byte-level BPE on the texts that ``preprocess`` would read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tridock.data.input.documents import Rejection, parse, remedy
from tridock.data.input.sources import Chunk, Source, read_chunks
from tridock.data.preprocess import CHUNK_BYTES
from tridock.data.progress import Done, Progress
from tridock.data.tokenize.learner import learn
from tridock.data.tokenize.tokenizer import TOKENIZER_FILES
from tridock.errors import Problem, RequestError


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a run. Without ``rejects`` the first invalid line stops it."""

    sources: tuple[Source, ...]
    keys: tuple[str, ...]
    vocab_size: int
    output: Path
    rejects: Path | None = None

    @property
    def outputs(self) -> list[tuple[str, Path]]:
        """The files that a run writes, each with the option that names it."""
        paths = [self.output / name for name in TOKENIZER_FILES]
        rejects = [] if self.rejects is None else [("--rejects", self.rejects)]
        return [*[("--output", path) for path in paths], *rejects]


@dataclass(slots=True)
class Trained:
    """The result. ``str()`` is for the user."""

    output: Path
    vocab_size: int = 0
    wanted: int = 0
    documents: int = 0
    rejected: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        fewer = f" ({self.wanted:,} requested: the texts have no more)" if self.vocab_size < self.wanted else ""
        return (
            f"{self.output}: {self.vocab_size:,} tokens{fewer}, byte-level BPE of {self.documents:,} documents,"
            f" {self.bytes / 1e6:,.1f} MB; {self.rejected:,} rejected; tokenizer.json, vocab.json, merges.txt"
        )


def train_tokenizer(
    request: Request, progress: Progress | None = None, report: Callable[[str], None] = lambda _: None
) -> Trained:
    """Writes the three files to ``output``. The same texts give the same bytes.

    Memory grows with the number of different words, not of texts. Raises :class:`RequestError` with file and line for
    an invalid line, unless they are skipped; nothing is written then.
    """
    done = Trained(request.output, wanted=request.vocab_size)
    rejects = _Rejects(request.rejects)
    try:
        with ExitStack() as stack:
            stack.enter_context(rejects)
            texts = _texts(request, done, rejects, progress, report)
            tokenizer = learn(texts, request.vocab_size)
            tokenizer.save(request.output)
            rejects.publish()
    except OSError as error:
        todo, got = "free some space there, or choose another --output", error.strerror or str(error)
        raise RequestError(Problem(str(request.output), "cannot be written", got, todo)) from None
    done.vocab_size = tokenizer.vocab_size
    return done


def _texts(
    request: Request, done: Trained, rejects: _Rejects, progress: Progress | None, report: Callable[[str], None]
) -> Iterator[str]:
    total = 0 if any(source.path is None for source in request.sources) else sum(s.bytes for s in request.sources)
    before = 0
    for number, source in enumerate(request.sources):
        for chunk in read_chunks(number, source, request.keys, CHUNK_BYTES):
            if chunk.broken is not None:
                rejects.add(chunk, Rejection(0, chunk.broken.what, chunk.broken.got, chunk.data), chunk.broken)
                done.rejected += 1
            else:
                yield from _documents(request, chunk, done, rejects)
            done.bytes = before + (chunk.finished.bytes if chunk.finished else chunk.position)
            if progress is not None:
                progress(Done(done.bytes, total, done.documents, 0))
        before = done.bytes
    if not done.documents:
        raise RequestError(Problem("--input", "contains no document", "", "give texts to train on"))
    report(f"read {done.documents:,} documents; training the tokenizer")


def _documents(request: Request, chunk: Chunk, done: Trained, rejects: _Rejects) -> list[str]:
    found = parse(chunk.data, request.keys, chunk.source.kind)
    for rejection in found.rejected_lines:
        todo = remedy(request.keys, chunk.source.kind)
        rejects.add(chunk, rejection, rejection.problem(chunk.source.name, chunk.first_line, todo))
    done.rejected += len(found.rejected_lines)
    done.documents += len(found.counts[0])
    return [text for texts in found.texts for text in texts]


class _Rejects:
    """A context manager that writes rejected lines to a file; without a file, a rejected line is an error."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        if path is not None:
            self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")

    def __enter__(self) -> _Rejects:
        if self._path is not None:
            self._file = self._partial.open("xb")
        return self

    def add(self, chunk: Chunk, rejection: Rejection, problem: Problem) -> None:
        """Writes the line, or raises :class:`RequestError`."""
        if self._file is None:
            raise RequestError(problem)
        self._file.write(rejection.record(chunk.source.name, chunk.first_line))

    def publish(self) -> None:
        if self._path is not None and self._file is not None:
            self._file.close()
            self._partial.replace(self._path)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)
