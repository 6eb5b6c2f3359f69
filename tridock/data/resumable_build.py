"""A data set under construction: a hidden folder beside the output, and a journal from which a run resumes.

``.<output prefix>.unfinished/`` has for each key ``<k>.bin`` (tokens), ``<k>.lengths`` (int32 per sequence)
and ``<k>.documents`` (int64 per document, Megatron's document index), and also ``rejects``, ``finished`` (a line of
JSON per input that has been read) and ``journal.json``. The journal is saved after the data that it counts. A resumed
run truncates the files to its counts.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np
from pydantic import BaseModel, ValidationError

from tridock import interrupts
from tridock.contracts.partials import partial_folder
from tridock.contracts.run_folder import write_atomic
from tridock.data.dataset.indexed_dataset import Tokens, bin_path, idx_path, publish, write_index
from tridock.data.dataset.manifest import Input
from tridock.data.digest import Digest, sha256_of
from tridock.data.tokenize.blocks import Block
from tridock.errors import Problem, RequestError

_JOURNAL: Final = "journal.json"
_PARTS: Final = ("bin", "lengths", "documents")


class Counts(BaseModel):
    """Numbers of what has been written for one key, and the hashes of its complete files."""

    bytes: int = 0
    sequences: int = 0
    documents: int = 0
    bin_sha256: str | None = None
    """SHA-256 of the complete .bin, and below of the .idx; None before they are complete."""
    idx_sha256: str | None = None


class Finished(BaseModel):
    """An input that has been read to its end, and its ``ctime``."""

    input: Input
    changed_ns: int


class Journal(BaseModel):
    """The state from which a run resumes.

    ``source`` is the number of the current input. ``offset`` and ``digest`` (SHA-256) cover its lines so far.
    ``request`` has the facts of the run that started it.
    """

    request: dict[str, str]
    keys: list[Counts]
    source: int = 0
    offset: int = 0
    digest: str = ""
    finished_size: int = 0
    """Size in bytes of the file ``finished``."""
    finished_bytes: int = 0
    """Total bytes of the inputs listed in ``finished``."""
    documents_in: int = 0
    rejected: int = 0
    empty: int = 0
    rejects_bytes: int = 0
    whole: bool = False
    """All files are complete and only need to be renamed."""


class ResumableBuild:
    """The files, opened for appending, and their journal. A context manager that holds the lock of the folder.

    After an exception the folder stays for ``--resume`` if its journal was saved; otherwise it is removed. Raises
    :class:`RequestError` if another run uses the folder, or if a run with other options started it.
    """

    def __init__(self, prefix: Path, keys: int, request: dict[str, str], resume: bool) -> None:
        self.folder = build_folder(prefix)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.example: Problem | None = None
        """The first rejected line since this process started."""
        self._lock = (self.folder / "lock").open("wb")
        try:
            self._lock_folder()
        except BaseException:
            self._lock.close()
            raise
        self._files: list[BinaryIO] = []
        try:
            found = self._load_journal(request) if resume else None
            self.resumed = found is not None
            self._digests: list[Digest] = []
            self.journal = found or Journal(request=request, keys=[Counts() for _ in range(keys)])
            self.finished = self._load_finished()
            self._open()
        except BaseException:  # Ctrl-C too
            self._close()
            raise

    def _lock_folder(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            what, todo = "is in use by another run", "wait for it, or choose another --output-prefix"
            raise RequestError(Problem(str(self.folder), what, "", todo)) from None

    def _load_journal(self, request: dict[str, str]) -> Journal | None:
        path = self.folder / _JOURNAL
        try:
            journal = Journal.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            todo = "leave --resume out and start from the beginning"
            raise RequestError(Problem(str(path), "is not a journal of this version", "", todo)) from None
        todo = "resume with the same inputs and options, or leave --resume out and start from the beginning"
        problems = [
            Problem("--resume", f"the run was started with {name} {was}", request.get(name, "(none)"), todo)
            for name, was in journal.request.items()
            if request.get(name) != was
        ]
        RequestError.raise_for(problems)
        return journal

    def _load_finished(self) -> list[Finished]:
        path, size = self.folder / "finished", self.journal.finished_size
        if not size:
            return []
        if not path.exists() or path.stat().st_size < size:
            raise _lost(path)
        return [Finished.model_validate_json(line) for line in path.read_bytes()[:size].splitlines()]

    def _open(self) -> None:
        if not self.resumed:
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
        if self.journal.whole:
            return
        for number, counts in enumerate(self.journal.keys):
            sizes = (counts.bytes, counts.sequences * 4, (counts.documents + 1) * 8)
            for part, size in zip(_PARTS, sizes, strict=True):
                self._files.append(_open_at(self.folder / f"{number}.{part}", size, not self.resumed))
            self._digests.append(Digest(self.folder / f"{number}.bin"))
        for name, size in (("finished", self.journal.finished_size), ("rejects", self.journal.rejects_bytes)):
            self._files.append(_open_at(self.folder / name, size, not self.resumed))

    def add(self, number: int, block: Block) -> None:
        """Appends the documents of a block to key ``number``."""
        counts = self.journal.keys[number]
        tokens, lengths, documents = self._files[3 * number : 3 * number + 3]
        tokens.write(block.tokens.data)
        self._digests[number].update(block.tokens.data)
        lengths.write(block.lengths)
        documents.write((np.cumsum(block.sequences) + counts.sequences).astype("<i8").tobytes())
        counts.bytes += block.tokens.nbytes
        counts.sequences += len(block.lengths) // 4
        counts.documents += len(block.sequences)

    def finish(self, finished: Finished) -> None:
        """Records an input that has been read to its end."""
        self.finished.append(finished)
        line = f"{finished.model_dump_json()}\n".encode()
        self._files[-2].write(line)
        self.journal.finished_size += len(line)
        self.journal.finished_bytes += finished.input.bytes

    def reject(self, record: bytes) -> None:
        self._files[-1].write(record)
        self.journal.rejects_bytes += len(record)
        self.journal.rejected += 1

    def save(self) -> None:
        """Syncs all files to disk, then writes the journal. Raises :class:`RequestError` if the folder was removed."""
        lock = self.folder / "lock"
        if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(self._lock.fileno())):
            raise _lost(self.folder)
        for file in self._files:
            if os.fstat(file.fileno()).st_nlink == 0:
                raise _lost(Path(file.name))
            file.flush()
            os.fsync(file.fileno())
        write_atomic(self.folder / _JOURNAL, self.journal.model_dump_json().encode())

    def publish(self, prefixes: Sequence[Path], dtype: np.dtype[Any], rejects: Path | None) -> None:
        """Renames all files to their final names. May be interrupted at any point and repeated."""
        finishing = self.journal.whole
        if not finishing:
            for counts, digest in zip(self.journal.keys, self._digests, strict=True):
                counts.bin_sha256 = digest.hexdigest()
            self.journal.whole = True
            self.save()
        for number, prefix in enumerate(prefixes):
            data, index = self.folder / f"{number}.bin", self.folder / f"{number}.idx"
            if data.exists():
                counts = self.journal.keys[number]
                lengths = _mapped(self.folder / f"{number}.lengths", "<i4", counts.sequences)
                documents = _mapped(self.folder / f"{number}.documents", "<i8", counts.documents + 1)
                write_index(index, dtype, lengths, documents)
                counts.idx_sha256 = sha256_of(index)
                self.save()
                publish(prefix, data, index)
            elif not finishing:
                raise _lost(data)
            elif index.exists():
                index.replace(idx_path(prefix))  # the process was killed between the two renames
            elif not bin_path(prefix).is_file() or not idx_path(prefix).is_file():
                raise _lost(bin_path(prefix))
        if rejects is not None:
            with partial_folder(rejects) as place:
                shutil.copyfile(self.folder / "rejects", place / rejects.name)
                (place / rejects.name).replace(rejects)

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    @property
    def can_resume(self) -> bool:
        return (self.folder / _JOURNAL).exists()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        with interrupts.delayed():  # an impatient second Ctrl-C would leave the folder
            for file in self._files:
                with contextlib.suppress(OSError):  # what a full disk did not store is truncated when the run resumes
                    file.close()
            if self.folder.exists() and not self.can_resume:
                self.remove()
            self._lock.close()


def _lost(path: Path) -> RequestError:
    todo = "start from the beginning, and leave the folder alone until the run is done"
    return RequestError(Problem(str(path), "was removed during the run", "", todo))


def build_folder(prefix: Path) -> Path:
    """Returns the hidden folder of a data set under construction."""
    return prefix.with_name(f".{prefix.name}.unfinished")


def _open_at(path: Path, size: int, new: bool) -> BinaryIO:
    """Opens a file for appending, truncated to ``size``. A new document index starts with 0."""
    if not new and (not path.exists() or path.stat().st_size < size):
        raise _lost(path)
    if new:
        path.write_bytes(b"\0" * 8 if path.suffix == ".documents" else b"")
    os.truncate(path, size)
    return path.open("ab")


def _mapped(path: Path, dtype: str, count: int) -> Tokens:
    return np.memmap(path, dtype=np.dtype(dtype), mode="r", shape=(count,)) if count else np.zeros(0, np.dtype(dtype))
