"""The files of checkpoints: names of folders and pointers, ``files.json``, and which checkpoints to remove.

A checkpoint is complete if its ``files.json``, which is written last, exists and all files match it.
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
_TODO: Final = "restore it, or continue from another checkpoint"


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


def to_remove(complete: Mapping[int, bool], keep: int | None, newest: int) -> list[int]:
    """Returns the iterations that ``train.keep_checkpoints`` removes: those before the ``keep``-th newest complete one.

    ``complete`` maps each iteration that has a folder to whether it is complete. Iterations above ``newest``, the one
    just saved, do not count.
    """
    good = sorted(
        (iteration for iteration, is_good in complete.items() if is_good and iteration <= newest),
        reverse=True,
    )
    if keep is None or len(good) < keep:
        return []
    return sorted(number for number in complete if number < good[keep - 1])


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


@dataclass(frozen=True, slots=True)
class Entry:
    """A file's size in bytes and its SHA-256, as in ``files.json``."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path, *, sync: bool = False) -> Entry:
        """Reads the file; with ``sync`` also syncs it to disk."""
        with path.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(os.fstat(file.fileno()).st_size, digest)


def sizes_in(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of each file in a checkpoint, by its relative path, without the manifest."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.name != MANIFEST}


def manifest_bytes(iteration: int, entries: Mapping[str, Entry]) -> bytes:
    """Returns the content of ``files.json``."""
    files = {name: {"bytes": entries[name].size, "sha256": entries[name].sha256} for name in sorted(entries)}
    return (json.dumps({"iteration": iteration, "files": files}, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Entry] | Problem:
    """Returns the files that a checkpoint must contain, or the problem with its manifest."""
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
    """Yields the problems of the files ``names``; compares hashes if ``read``, otherwise sizes only."""
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


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is complete; compares only the sizes of its files."""
    manifest = read_manifest(folder)
    return not isinstance(manifest, Problem) and not any(damage(folder, manifest, manifest, read=False))


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
