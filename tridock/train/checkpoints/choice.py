"""Chooses the checkpoint to resume from: the newest of which every rank has, or gets, the files that it reads.

Whole is what its hash says. Everything here is a collective with the same result on all ranks.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from tridock.contracts.checkpoint_files import Entry, Illness, Manifest, damage, read_manifest
from tridock.contracts.checkpoints import MANIFEST
from tridock.contracts.events import Event, append_event
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError, RunError, count
from tridock.progress import size_text
from tridock.train.checkpoints import files
from tridock.train.checkpoints.exchange import Progress, exchange, group_of, transfers
from tridock.train.checkpoints.files import Names
from tridock.train.rank.process_group import AgreedError, Ranks, agree_on_errors, any_rank

Needed = Callable[[Path, Collection[str]], Iterator[Collection[str]]]
"""Yields names of files that this rank reads from a checkpoint; those are there once it is asked for more. Its second
argument are the names of all files of the checkpoint."""


def choose(source: Path, names: Names, ranks: Ranks, needed: Needed, run_folder: Path) -> Path:
    """Returns the folder to resume from: ``source`` itself, or the newest complete one in it, whatever the pointer.

    One in ill health is chosen only if it is ``source``. Every file is read once; ranks that see the same folder divide
    them. A node gets what its ranks need and only other nodes have. Prints, and records in the run's folder, those that
    are passed over. Raises :class:`AgreedError` if no checkpoint is complete.
    """
    tried: dict[Path, tuple[Problem, ...]] = {}
    for folder in _candidates(source, names, ranks, tried):
        ill = _illness(folder, ranks)
        if ill is not None and folder != source:
            todo = f"to continue from it all the same, set train.load to {folder}"
            tried[folder] = (Problem(str(folder), "was saved in ill health", str(ill), todo),)
            continue
        if not (problems := _provide(folder, ranks, needed, ill)):
            if ill is not None and ranks.first:
                print(f"warning: {folder} was saved in ill health: {ill}", flush=True)
            for other, found in tried.items() if ranks.first else ():
                reasons = [str(problem) for problem in found]
                append_event(run_folder, Event.CHECKPOINT_REJECTED, folder=str(other), reasons=reasons)
                print("\n".join([f"warning: {other} is passed over:", *reasons]), flush=True)
            return folder
        tried[folder] = problems
    what = f"no complete checkpoint is in {source}" if tried else f"there is no checkpoint in {source}"
    todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    got = "" if tried else "no such folder" if not source.is_dir() else "no checkpoint's folder in it"
    every = itertools.chain.from_iterable(tried.values())
    raise AgreedError(RequestError([Problem("train.load", what, got, todo), *every]))


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


def _illness(folder: Path, ranks: Ranks) -> Illness | None:
    """Returns the illness that any rank's node knows of a checkpoint."""
    manifest = read_manifest(folder)
    found: list[Illness | None] = [None] * ranks.world_size
    dist.all_gather_object(found, None if isinstance(manifest, Problem) else manifest.ill)
    return next((it for it in found if it is not None), None)


def _provide(folder: Path, ranks: Ranks, needed: Needed, ill: Illness | None) -> tuple[Problem, ...]:
    """Brings what the ranks need of a checkpoint to their nodes. Returns the problems that any rank finds."""
    try:
        leaders = _leaders(folder, ranks)
        have = _whole(folder, ranks, leaders)
        steps = needed(folder, {name for entries in have.values() for name in entries})
        while True:
            with agree_on_errors(ranks):
                names = next(steps, None)
            asked: list[Collection[str] | None] = [None] * ranks.world_size
            dist.all_gather_object(asked, names)
            if all(it is None for it in asked):
                return ()
            _bring(folder, ranks, leaders, have, asked, ill)
    except AgreedError as found:
        return found.error.problems


def _leaders(folder: Path, ranks: Ranks) -> list[int]:
    """Returns for each rank the lowest one that sees the same files there, or that is on the same node."""
    identities: list[tuple[tuple[int, ...] | None, int]] = [(None, 0)] * ranks.world_size
    dist.all_gather_object(identities, (_identity(folder / MANIFEST), ranks.local_rank))
    nodes = itertools.accumulate(local_rank == 0 for _, local_rank in identities)
    places = [identity or node for (identity, _), node in zip(identities, nodes, strict=True)]
    return [places.index(place) for place in places]


def _whole(folder: Path, ranks: Ranks, leaders: Sequence[int]) -> dict[int, dict[str, Entry]]:
    """Returns the whole files on each file system, by its leader.

    Raises :class:`AgreedError` with damaged ones of which there is no other copy, and where no node has the checkpoint.
    """
    manifest = read_manifest(folder)
    listed = {} if isinstance(manifest, Problem) else manifest.here
    sharing = [rank for rank, leader in enumerate(leaders) if leader == leaders[ranks.rank]]
    share = files.assign_to_ranks({name: entry.size for name, entry in listed.items()}, sharing)[ranks.rank]
    damaged = {name: problem for name in share for problem in damage(folder, listed, [name], read=True)}
    good = {name: listed[name] for name in share if name not in damaged}
    shares: list[tuple[bool, dict[str, Entry]]] = [(False, {})] * ranks.world_size
    dist.all_gather_object(shares, (not isinstance(manifest, Problem), good))
    have: dict[int, dict[str, Entry]] = {}
    for leader, (_, entries) in zip(leaders, shares, strict=True):
        have.setdefault(leader, {}).update(entries)
    with agree_on_errors(ranks):
        if isinstance(manifest, Problem) and not any(is_there for is_there, _ in shares):
            raise RequestError(manifest)
        RequestError.raise_for(
            it for name, it in damaged.items() if not any(name in entries for entries in have.values())
        )
    return have


def _bring(
    folder: Path,
    ranks: Ranks,
    leaders: Sequence[int],
    have: dict[int, dict[str, Entry]],
    asked: Sequence[Collection[str] | None],
    ill: Illness | None,
) -> None:
    """Brings the files that ranks have ``asked`` for to the nodes that lack them, and lists them there."""
    wanted: dict[int, set[str]] = {leader: set() for leader in have}
    for leader, names in zip(leaders, asked, strict=True):
        wanted[leader].update(set(names or ()) - set(have[leader]))
    moved = transfers(have, wanted)
    coming = {(it.name, target) for it in moved for target in it.targets}
    leader = leaders[ranks.rank]
    with agree_on_errors(ranks):
        if missing := [name for name in sorted(wanted[leader]) if (name, leader) not in coming]:
            todo = "add the node that has it, or continue from another checkpoint"
            todo = f"{todo} (train.checkpoint_copies: 2 prevents this)"
            raise RequestError(Problem(str(folder / name), "is on no node of this run", "", todo) for name in missing)
    if not moved:
        return
    if ranks.first:
        size = sum(it.entry.size * len(it.targets) for it in moved)
        print(f"{folder}: {count(len(moved), 'file')}, {size_text(size)}, of other nodes are needed", flush=True)
    group = group_of(moved)
    with agree_on_errors(ranks):
        if ranks.rank in {rank for it in moved for rank in (it.source, *it.targets)}:
            exchange(folder, moved, ranks, group, Progress(folder, moved, ranks.rank))
    for it in moved:
        for target in it.targets:
            have[target][it.name] = it.entry
    everything = {name: entry for entries in have.values() for name, entry in entries.items()}
    with agree_on_errors(ranks):
        if leader == ranks.rank and wanted[leader]:
            elsewhere = {name: entry for name, entry in everything.items() if name not in have[leader]}
            _list(folder, Manifest(have[leader], elsewhere, ill))


def _list(folder: Path, manifest: Manifest) -> None:
    todo = "free space there or fix its permissions"
    with RunError.in_place_of(OSError, folder / MANIFEST, "could not be written", todo):
        files.sync_folders(folder)
        write_atomic(folder / MANIFEST, manifest.to_bytes())


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
