"""The files of checkpoints: names of folders and pointers, who hashes which file, and which checkpoints to remove."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.contracts.checkpoints import LATEST, MANIFEST, TRACKER, ZERO_RANK

_RANK = re.compile(rf"{ZERO_RANK.pattern}|^__(\d+)_\d+\.distcp$")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of checkpoints that an engine's own tools expect."""

    folder_format: str
    pointers: tuple[tuple[str, str], ...]
    """Files that name the newest checkpoint, each with its format; Tridock reads the last one."""

    def folder(self, iteration: int) -> str:
        return self.folder_format.format(iteration)

    def iteration(self, name: str) -> int | None:
        """Returns the iteration in a folder's name; None for any other name."""
        return _number(self.folder_format, name)

    def found(self, folder: Path) -> list[int]:
        """Returns the iterations that have a folder in ``folder``, in any order."""
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [number for number in map(self.iteration, names) if number is not None]

    def pointed(self, text: str) -> int | None:
        """Returns the iteration in a pointer's text; None for any other text."""
        return _number(self.pointers[-1][1], text.strip())


TORCH: Final = Names("iter_{:07d}", ((LATEST, "iter_{:07d}"),))
MEGATRON: Final = Names("iter_{:07d}", ((TRACKER, "{}"),))
DEEPSPEED: Final = Names("global_step{}", ((LATEST, "global_step{}"), (TRACKER, "{}")))


def _number(form: str, text: str) -> int | None:
    digits = text.removeprefix(form.partition("{")[0])
    return int(digits) if digits.isascii() and digits.isdecimal() and form.format(int(digits)) == text else None


def to_remove(complete: Mapping[int, bool], keep: int | None, newest: int, ill: Collection[int] = ()) -> list[int]:
    """Returns the iterations that ``train.keep_checkpoints`` removes: those before the ``keep``-th newest complete one.

    ``complete`` maps each iteration that has a folder to whether it is complete. Iterations above ``newest``, the one
    just saved, do not count. Those in ``ill`` health, of which the newest ``keep`` stay too, replace no others.
    """
    if keep is None:
        return []
    whole = sorted((number for number, is_whole in complete.items() if is_whole and number <= newest), reverse=True)
    good = [number for number in whole if number not in ill]
    removed = {number for number in complete if number < good[keep - 1]} if len(good) >= keep else set[int]()
    return sorted(removed.union([number for number in whole if number in ill][keep:]))


def assign_to_ranks(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Returns the files that each rank hashes: by name those that it wrote, still in its page cache; others by size."""
    shares: dict[int, list[str]] = {rank: [] for rank in ranks}
    load = dict.fromkeys(ranks, 0)
    others = []
    for name in sorted(sizes):
        match = _RANK.match(name.rpartition("/")[2])
        owner = int(match[1] or match[2]) if match else -1
        if owner in shares:
            shares[owner].append(name)
            load[owner] += sizes[name]
        else:
            others.append(name)
    for name in sorted(others, key=lambda name: (-sizes[name], name)):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        shares[rank].append(name)
        load[rank] += sizes[name]
    return shares


def sizes_in(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of each file in a checkpoint, by its relative path, without the manifest."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.name != MANIFEST}


def sync_folders(folder: Path) -> None:
    """Syncs a folder and all folders below it to disk."""
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(place)


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk: its list of files, not their content."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
