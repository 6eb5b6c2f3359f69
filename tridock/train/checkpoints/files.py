"""The files of checkpoints: how their folders are called, what makes one whole, which to try and which to remove.

A checkpoint is whole when its ``files.json`` is there and all files are as it says. It is written after all others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.contracts.checkpoints import LATEST, MANIFEST, TRACKER, ZERO_RANK
from tridock.errors import Problem

_RANK = re.compile(rf"{ZERO_RANK.pattern}|^__(\d+)_\d+\.distcp$")
_TODO: Final = "bring it back, or go on from another checkpoint"


@dataclass(frozen=True, slots=True)
class Names:
    """How an engine's own tools expect checkpoints to be called."""

    folder_format: str
    pointers: tuple[tuple[str, str], ...]
    """Files that name the newest checkpoint, and how; the last of them is the one that counts."""

    def folder(self, iteration: int) -> str:
        """The folder of one checkpoint."""
        return self.folder_format.format(iteration)

    def iteration(self, name: str) -> int | None:
        """The iteration in a folder's name; None for any other name."""
        return _number(self.folder_format, name)

    def found(self, folder: Path) -> list[int]:
        """The iterations that have a folder in there, in any order."""
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [number for number in map(self.iteration, names) if number is not None]

    def pointed(self, text: str) -> int | None:
        """The iteration that the pointer names; None where it names none."""
        return _number(self.pointers[-1][1], text.strip())


TORCH: Final = Names("iter_{:07d}", ((LATEST, "iter_{:07d}"),))
MEGATRON: Final = Names("iter_{:07d}", ((TRACKER, "{}"),))
DEEPSPEED: Final = Names("global_step{}", ((LATEST, "global_step{}"), (TRACKER, "{}")))


def _number(form: str, text: str) -> int | None:
    digits = text.removeprefix(form.partition("{")[0])
    return int(digits) if digits.isascii() and digits.isdecimal() and form.format(int(digits)) == text else None


def to_try(iterations: Collection[int], pointed: int | None) -> list[int]:
    """The order in which a load looks at checkpoints: the pointer's, then what came before it, newest first.

    What is newer than the pointer says was given up, or its save did not come to its end. Without a pointer that can
    be read, all are tried.
    """
    if pointed is None:
        return sorted(iterations, reverse=True)
    return sorted({pointed, *(iteration for iteration in iterations if iteration < pointed)}, reverse=True)


def to_remove(whole: Mapping[int, bool], keep: int | None, newest: int) -> list[int]:
    """What ``train.keep_checkpoints`` lets go: every checkpoint that is older than the ``keep``-th newest whole one.

    ``whole`` says of every iteration that has a folder whether it is whole. What is newer than ``newest``, which was
    saved just now, is of a past from which the run has turned away, and counts for nothing.
    """
    good = sorted(
        (iteration for iteration, is_whole in whole.items() if is_whole and iteration <= newest), reverse=True
    )
    if keep is None or len(good) < keep:
        return []
    return sorted(number for number in whole if number < good[keep - 1])


def dealt(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Which rank hashes which files: its own by their name (they are in its memory still), the rest by size."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """What the manifest says of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path, *, sync: bool = False) -> Entry:
        """Reads the file; with ``sync`` also brings it to the disk."""
        with path.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(os.fstat(file.fileno()).st_size, digest)


def sizes_in(folder: Path) -> dict[str, int]:
    """The size of each file in a checkpoint, in bytes, by its path in there; without the manifest."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.name != MANIFEST}


def manifest_bytes(iteration: int, entries: Mapping[str, Entry]) -> bytes:
    """The content of the manifest."""
    files = {name: {"bytes": entries[name].size, "sha256": entries[name].sha256} for name in sorted(entries)}
    return (json.dumps({"iteration": iteration, "files": files}, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Entry] | Problem:
    """What the checkpoint must hold, or why that cannot be told."""
    path = folder / MANIFEST
    try:
        files = json.loads(path.read_bytes())["files"]
        return {name: Entry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        what = "is missing: the save did not come to its end"
        if not folder.is_dir():
            return Problem(str(folder), "is missing", "", _TODO)
        return Problem(str(path), what, "", _TODO)
    except OSError as error:
        return Problem(str(path), "cannot be read", error.strerror or str(error), _TODO)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Problem(str(path), "does not list the checkpoint's files", "", _TODO)


def damage(folder: Path, manifest: Mapping[str, Entry], names: Collection[str], *, read: bool) -> Iterator[Problem]:
    """What is wrong with the files ``names``; without ``read`` only what their sizes tell."""
    for name in names:
        path = folder / name
        try:
            entry = manifest[name]
            size = path.stat().st_size
            if size != entry.size:
                what = "is cut short" if size < entry.size else "is longer than it was"
                yield Problem(str(path), what, f"{size} bytes instead of {entry.size}", _TODO)
            elif read and (found := Entry.of(path).sha256) != entry.sha256:
                got = f"sha256 {found[:12]}… instead of {entry.sha256[:12]}…"
                yield Problem(str(path), "has changed since it was saved", got, _TODO)
        except (FileNotFoundError, KeyError):
            yield Problem(str(path), "is missing", "", _TODO)
        except OSError as error:
            yield Problem(str(path), "cannot be read", error.strerror or str(error), _TODO)


def looks_whole(folder: Path) -> bool:
    """Whether the checkpoint is whole by the sizes of its files."""
    manifest = read_manifest(folder)
    return not isinstance(manifest, Problem) and not any(damage(folder, manifest, manifest, read=False))


def sync_folders(folder: Path) -> None:
    """Brings the names in a folder, and in those below it, to the disk."""
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(place)


def sync_folder(folder: Path) -> None:
    """Brings the names in one folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
