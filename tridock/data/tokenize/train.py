"""``tridock data train-tokenizer``: trains a byte-level BPE on the texts that ``preprocess`` would read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tridock.contracts.partials import partial_folder
from tridock.data.input.documents import Rejection, check_share, form_of, parse
from tridock.data.input.sources import Chunk, Source, read_chunks
from tridock.data.preprocess import CHUNK_BYTES
from tridock.data.progress import Done, Progress
from tridock.data.tokenize.learner import learn
from tridock.data.tokenize.tokenizer import TOKENIZER_FILES
from tridock.errors import Problem, RequestError, reason_of


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a run. Without ``rejects`` the first invalid line stops it."""

    sources: tuple[Source, ...]
    keys: tuple[str, ...]
    vocab_size: int
    output: Path
    rejects: Path | None = None
    max_rejects: float = 1

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
    example: Problem | None = None

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
    try:
        with _rejects_file(request.rejects) as rejects:
            tokenizer = learn(_texts(request, done, rejects, progress, report), request.vocab_size)
            tokenizer.save(request.output)
    except OSError as error:
        todo, got = "free some space there, or choose another --output", reason_of(error)
        raise RequestError(Problem(str(request.output), "cannot be written", got, todo)) from None
    done.vocab_size = tokenizer.vocab_size
    return done


@contextmanager
def _rejects_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Opens the file for rejected lines, which gets its name at the end of the block; None without a path."""
    if path is None:
        yield None
        return
    with partial_folder(path) as folder:
        with (folder / path.name).open("xb") as file:
            yield file
        (folder / path.name).replace(path)


def _texts(
    request: Request, done: Trained, rejects: BinaryIO | None, progress: Progress | None, report: Callable[[str], None]
) -> Iterator[str]:
    """Yields the texts; writes rejected lines to ``rejects``, without which one is an error."""
    total = 0 if any(source.path is None for source in request.sources) else sum(s.bytes for s in request.sources)
    before = 0
    for number, source in enumerate(request.sources):
        for chunk in read_chunks(number, source, request.keys, CHUNK_BYTES):
            if chunk.broken is not None:
                cut_off = Rejection(0, chunk.broken.what, chunk.broken.got, chunk.data)
                _reject(chunk, cut_off, chunk.broken, done, rejects)
            else:
                yield from _documents(request, chunk, done, rejects)
            done.bytes = before + (chunk.finished.bytes if chunk.finished else chunk.position)
            if progress is not None:
                progress(Done(done.bytes, total, done.documents, 0))
        before = done.bytes
    check_share(done.documents + done.rejected, done.rejected, request.max_rejects, done.example)
    if not done.documents:
        raise RequestError(Problem("--input", "contains no document", "", "give texts to train on"))
    report(f"read {done.documents:,} documents; training the tokenizer")


def _documents(request: Request, chunk: Chunk, done: Trained, rejects: BinaryIO | None) -> list[str]:
    found, form = parse(chunk.data, request.keys, chunk.source.kind), form_of(request.keys, chunk.source.kind)
    for rejection in found.rejected_lines:
        _reject(chunk, rejection, rejection.problem(chunk.source.name, chunk.first_line, form), done, rejects)
    done.documents += len(found.counts[0])
    return [text for texts in found.texts for text in texts]


def _reject(chunk: Chunk, rejection: Rejection, problem: Problem, done: Trained, rejects: BinaryIO | None) -> None:
    if rejects is None:
        raise RequestError(problem)
    rejects.write(rejection.record(chunk.source.name, chunk.first_line))
    done.rejected, done.example = done.rejected + 1, done.example or problem
