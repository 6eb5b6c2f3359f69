"""Sends files of a checkpoint from one node's disk to others' over the network of the ranks.

Nodes that share no folder have the files that their own ranks wrote. Ranks of another layout, on other nodes or in the
place of a lost one read further files, which nodes that have them send. What arrives is compared with its SHA-256.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import torch
import torch.distributed as dist

from tridock.contracts import heartbeat
from tridock.contracts.checkpoint_files import Entry
from tridock.contracts.partials import partial_of, remove_left_files
from tridock.errors import Problem, RunError
from tridock.progress import size_text
from tridock.train.rank.process_group import Ranks

Passed = Callable[[int], object]
_CHUNK: Final = 32 << 20
_REPORT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A file that rank ``source`` sends to each of the ranks ``targets``."""

    name: str
    entry: Entry
    source: int
    targets: tuple[int, ...]


def transfers(have: Mapping[int, Mapping[str, Entry]], wanted: Mapping[int, set[str]]) -> list[Transfer]:
    """Returns who sends what. ``have`` and ``wanted`` are by the rank that leads a file system; every rank must be
    given the same. Of several ranks that have a file, each sends about as many bytes. Leaves out what nobody has."""
    load, found = dict.fromkeys(have, 0), []
    for name in sorted({name for names in wanted.values() for name in names}):
        targets = tuple(sorted(rank for rank, names in wanted.items() if name in names))
        if not (sources := [rank for rank, entries in have.items() if name in entries]) or not targets:
            continue
        source = min(sources, key=lambda rank: (load[rank], rank))
        entry = have[source][name]
        load[source] += entry.size * len(targets)
        found.append(Transfer(name, entry, source, targets))
    return found


def exchange(
    folder: Path, moved: Sequence[Transfer], ranks: Ranks, group: dist.ProcessGroup, passed: Passed = lambda _: None
) -> None:
    """Sends and receives this rank's files. All ranks in the transfers call it, with the same list.

    ``passed`` is called with the size in bytes of each part that has been sent or has arrived.
    Raises :class:`RunError` with every file that did not arrive whole, or could not be written, once all are through.
    """
    problems = []
    for it in moved:  # in one order on all ranks: nobody waits for one that waits for it
        if it.source == ranks.rank:
            _send(folder / it.name, it, group, passed)
        elif ranks.rank in it.targets and (problem := _receive(folder / it.name, it, group, passed)) is not None:
            problems.append(problem)
    RunError.raise_for(problems)


def group_of(moved: Sequence[Transfer]) -> dist.ProcessGroup:
    """Returns a Gloo group of the ranks in the transfers. A collective of all ranks."""
    return dist.new_group(sorted({rank for it in moved for rank in (it.source, *it.targets)}), backend="gloo")


def _send(path: Path, it: Transfer, group: dist.ProcessGroup, passed: Passed) -> None:
    """A file that cannot be read, or is too short, arrives with zeros, which are not what its hash says."""
    with ExitStack() as opened:
        file = None
        with suppress(OSError):
            file = opened.enter_context(path.open("rb"))
        for chunk in _chunks(it.entry.size):
            read = 0
            with suppress(OSError):
                read = file.readinto(chunk.numpy().data) if file is not None else 0
            chunk[read:] = 0
            for target in it.targets:
                dist.send(chunk, target, group=group)
            passed(len(chunk))


def _receive(path: Path, it: Transfer, group: dist.ProcessGroup, passed: Passed) -> Problem | None:
    digest, partial, failed = hashlib.sha256(), partial_of(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_files(path)
        file: IO[bytes] | None = partial.open("wb")
    except OSError as error:
        file, failed = None, error
    for chunk in _chunks(it.entry.size):
        dist.recv(chunk, it.source, group=group)
        data = chunk.numpy().data
        digest.update(data)
        passed(len(chunk))
        if file is not None and failed is None:
            try:
                file.write(data)
            except OSError as error:
                failed = error
    try:
        if file is not None:
            with file:
                if failed is None:
                    file.flush()
                    os.fsync(file.fileno())
        if failed is None and digest.hexdigest() == it.entry.sha256:
            partial.replace(path)
            return None
    except OSError as error:
        failed = failed or error
    with suppress(OSError):
        partial.unlink()
    if failed is not None:
        todo = "free space there or fix its permissions"
        return Problem(str(path), "could not be written", failed.strerror or str(failed), todo)
    what, todo = f"did not arrive whole from rank {it.source}", "restore it, or continue from another checkpoint"
    return Problem(str(path), what, f"sha256 {digest.hexdigest()[:12]}… instead of {it.entry.sha256[:12]}…", todo)


def _chunks(size: int) -> Iterator[torch.Tensor]:
    """Yields one buffer again and again, each time as long as the next part."""
    buffer = torch.empty(min(size, _CHUNK), dtype=torch.uint8)
    for begin in range(0, size, _CHUNK):
        yield buffer[: min(_CHUNK, size - begin)]


class Progress:
    """Prints every ten seconds how much this rank has sent and got, and writes a heartbeat for each part."""

    def __init__(self, folder: Path, moved: Sequence[Transfer], rank: int) -> None:
        self._folder, self._done, self._said, self._lines = folder, 0, time.monotonic(), 0
        self._total = sum(it.entry.size for it in moved if rank in (it.source, *it.targets))

    def __call__(self, size: int) -> None:
        self._done += size
        heartbeat.beat(heartbeat.START)
        if (now := time.monotonic()) - self._said >= _REPORT_S or (self._lines and self._done == self._total):
            self._said, self._lines = now, self._lines + 1
            sys.stdout.write(f"{self._folder}: {size_text(self._done)} of {size_text(self._total)} exchanged\n")
            sys.stdout.flush()
