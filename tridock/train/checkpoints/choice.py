"""Chooses the checkpoint to resume from: the newest that is complete on every rank, by the hashes of all files.

Everything here is a collective with the same result on all ranks.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch.distributed as dist

from tridock.contracts.checkpoints import MANIFEST
from tridock.errors import Problem, RequestError
from tridock.train.checkpoints import files
from tridock.train.checkpoints.files import Names
from tridock.train.rank.process_group import AgreedError, Ranks, agree_on_errors, any_rank

Needed = Callable[[Path], Collection[str]]
"""Returns the files of a checkpoint that this rank reads."""
Rejected = Callable[[Path, Sequence[Problem]], None]
"""Called with every checkpoint that is skipped, and the reasons."""


def choose(source: Path, names: Names, ranks: Ranks, needed: Needed, rejected: Rejected) -> Path:
    """Returns the folder to resume from: ``source`` itself, or the newest complete one in it, whatever the pointer.

    Every file is read once; ranks that see the same folder divide them. Raises :class:`AgreedError` if no checkpoint is
    complete.
    """
    tried: dict[Path, tuple[Problem, ...]] = {}
    for folder in _candidates(source, names, ranks, tried):
        if not (problems := _damage(folder, ranks, needed(folder))):
            for other, reasons in tried.items():
                rejected(other, reasons)
            return folder
        tried[folder] = problems
    what = f"no complete checkpoint is in {source}" if tried else f"there is no checkpoint in {source}"
    todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    got = "" if tried else "no such folder" if not source.is_dir() else "no checkpoint's folder in it"
    reasons = tuple(itertools.chain.from_iterable(tried.values()))
    raise AgreedError(RequestError([Problem("train.load", what, got, todo), *reasons]))


def holds_checkpoint(source: Path, names: Names, ranks: Ranks) -> bool:
    """Whether any rank sees a checkpoint there, complete or not, or a pointer to one."""
    pointers = (source / pointer for pointer, _ in names.pointers)
    return any_rank(ranks, bool(names.found(source)) or any(pointer.exists() for pointer in pointers))


def _candidates(source: Path, names: Names, ranks: Ranks, tried: dict[Path, tuple[Problem, ...]]) -> list[Path]:
    """Returns the folders to check, in order."""
    itself = names.iteration(source.name) is not None and source.is_dir()
    pointer = source / names.pointers[-1][0]
    seen: list[tuple[bool, str | None, list[int]]] = [(False, None, [])] * ranks.world_size
    dist.all_gather_object(seen, (itself, _read(pointer), names.found(source)))
    if any(is_one for is_one, _, _ in seen):
        return [source]
    texts = [text for _, text, _ in seen if text is not None]
    pointed = [number for number in map(names.pointed, texts) if number is not None]
    iterations = {number for _, _, found in seen for number in found}
    if texts and not pointed and iterations:
        tried[pointer] = (
            Problem(str(pointer), "names no checkpoint", repr(texts[0]), "the newest complete one is used"),
        )
    elif iterations and max(pointed, default=0) < max(iterations) and pointed:
        older, newest = names.folder(max(pointed)), names.folder(max(iterations))
        todo = f"to continue from the older one, set train.load to {source / older}"
        tried[pointer] = (Problem(str(pointer), f"names an older checkpoint than {newest}", older, todo),)
    return [source / names.folder(iteration) for iteration in sorted({*pointed, *iterations}, reverse=True)]


def _damage(folder: Path, ranks: Ranks, needed: Collection[str]) -> tuple[Problem, ...]:
    """Returns the problems that any rank finds in a checkpoint."""
    manifest = files.read_manifest(folder)
    identities: list[tuple[int, ...] | None] = [None] * ranks.world_size
    dist.all_gather_object(identities, _identity(folder / MANIFEST))
    sharing = [rank for rank, identity in enumerate(identities) if identity == identities[ranks.rank]]
    try:
        with agree_on_errors(ranks):
            if isinstance(manifest, Problem):
                raise RequestError(manifest)
            sizes = {name: entry.size for name, entry in manifest.items()}
            share = files.assign_to_ranks(sizes, sharing)[ranks.rank]
            problems = [
                *files.damage(folder, manifest, share, read=True),
                *files.damage(folder, manifest, set(needed) - set(share), read=False),
            ]
            if problems:
                raise RequestError(problems)
    except AgreedError as found:
        return found.error.problems
    return ()


def _identity(path: Path) -> tuple[int, ...] | None:
    """Equal for ranks that see the same file: inode number and time come from its file system."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
