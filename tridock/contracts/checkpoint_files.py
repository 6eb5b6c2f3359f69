"""``files.json`` of a checkpoint: its files with their sizes and hashes.

A checkpoint is complete if its ``files.json``, which is written last, exists and all files match it. Where nodes share
no folder, each node's ``files.json`` has the node's own files, and under ``elsewhere`` those of the other nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from tridock.contracts.checkpoints import ILL, MANIFEST
from tridock.contracts.files_below import is_below
from tridock.errors import Problem, reason_of

_TODO: Final = "restore it, or continue from another checkpoint"


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


class Quantity(StrEnum):
    """What shows the health of a training."""

    LOSS = "loss"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Illness:
    """Why no training continues from a checkpoint: what was not finite, and first in which iteration."""

    what: Quantity
    iteration: int

    def __str__(self) -> str:
        return f"the {self.what} of iteration {self.iteration} is not finite"

    @classmethod
    def of(cls, content: Mapping[str, Any] | None) -> Illness | None:
        return None if content is None else cls(Quantity(content["what"]), int(content["iteration"]))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``files.json``: by name the files in this folder, and those that only other nodes have."""

    here: Mapping[str, Entry]
    elsewhere: Mapping[str, Entry] = field(default_factory=dict)
    ill: Illness | None = None

    def with_more(self, got: Mapping[str, Entry]) -> Manifest:
        """Returns it with files that have come from other nodes."""
        rest = {name: it for name, it in self.elsewhere.items() if name not in got}
        return Manifest({**self.here, **got}, rest, self.ill)

    def to_bytes(self) -> bytes:
        content: dict[str, Any] = {} if self.ill is None else {ILL: asdict(self.ill)}
        content |= {"files": _listed(self.here)} | ({"elsewhere": _listed(self.elsewhere)} if self.elsewhere else {})
        return (json.dumps(content, indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a node is to get of a checkpoint: files, and the nodes that have each; ``elsewhere`` has the others."""

    files: Mapping[str, Entry]
    nodes: Mapping[str, tuple[str, ...]]
    elsewhere: Mapping[str, Entry]
    ill: Illness | None


def _listed(entries: Mapping[str, Entry]) -> dict[str, dict[str, int | str]]:
    return {name: {"bytes": entries[name].size, "sha256": entries[name].sha256} for name in sorted(entries)}


def _entries(listed: Mapping[str, Any]) -> dict[str, Entry]:
    if outside := [name for name in listed if not is_below(name)]:
        raise ValueError(f"{outside[0]!r} is no file in the checkpoint")
    return {name: Entry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}


def read_manifest(folder: Path) -> Manifest | Problem:
    """Returns the files that a checkpoint must contain, or the problem with its manifest."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        ill = Illness.of(content.get(ILL))
        return Manifest(_entries(content["files"]), _entries(content.get("elsewhere", {})), ill)
    except FileNotFoundError:
        what = "is missing: the save did not come to its end"
        if not folder.is_dir():
            return Problem(str(folder), "is missing", "", _TODO)
        return Problem(str(path), what, "", _TODO)
    except OSError as error:
        return Problem(str(path), "cannot be read", reason_of(error), _TODO)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Problem(str(path), "does not list the checkpoint's files", "", _TODO)


def damage(folder: Path, entries: Mapping[str, Entry], names: Collection[str], *, read: bool) -> Iterator[Problem]:
    """Yields the problems of the files ``names``; compares hashes if ``read``, otherwise sizes only."""
    for name in names:
        path = folder / name
        try:
            entry = entries[name]
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
            yield Problem(str(path), "cannot be read", reason_of(error), _TODO)


def is_complete(folder: Path) -> bool:
    """Whether all files that a node has of a checkpoint are there; compares only their sizes."""
    manifest = read_manifest(folder)
    return not isinstance(manifest, Problem) and not any(damage(folder, manifest.here, manifest.here, read=False))
