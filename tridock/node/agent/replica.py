"""Copies of the head's files on a node that may take over a run, in ``.replica`` of the run's folder.

``checkpoints/`` holds what the node lacks of the head's newest checkpoint, with the head's manifest; ``files/`` the
run's records; ``copy.json``, which comes last, says what is complete.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts import checkpoints, run_folder
from tridock.contracts.codec import decode, encode
from tridock.contracts.lease import newest, read
from tridock.contracts.node_answers import ReplicaStatus
from tridock.contracts.supervision import Supervision
from tridock.contracts.vote import Copy

COMPLETE: Final = "copy.json"
FILES: Final = "files"
_SHARED: Final = 1 << 53
"""The iteration of the folder itself, which is newer than any copy of it."""


@dataclass(frozen=True, slots=True)
class Replica:
    """``copy.json``: the token of the lease under which the copy was made, and its checkpoint's folder name."""

    token: int
    iteration: int
    checkpoint: str | None

    def to_bytes(self) -> bytes:
        return encode(self).encode()


def copy_of(folder: Path) -> Copy:
    """Returns how new this node's copy of the run is."""
    kept = _replica(folder)
    return max((newest(folder), _SHARED), (0, 0) if kept is None else (kept.token, kept.iteration))


def status(folder: Path, token: int, name: str, manifest: bytes) -> ReplicaStatus:
    """Returns what this node lacks of the head's checkpoint ``name`` (empty: there is none). Removes older copies.

    ``token``: that of the supervisor that asks; a node that sees its lease file shares its folder.
    """
    kept = _replica(folder)
    for old in _staged(folder).glob("*"):
        if old.name != name and (kept is None or old.name != kept.checkpoint):
            shutil.rmtree(old)
    shares = read(folder, token) is not None
    if shares or not name:
        return ReplicaStatus(shares, ())
    supervision = _supervision(folder)
    own = {} if supervision.checkpoints is None else _entries(Path(supervision.checkpoints) / name)
    lacks = tuple(file for file, entry in json.loads(manifest)["files"].items() if own.get(file) != entry)
    return ReplicaStatus(shares, lacks)


def adopt(folder: Path, elected: Copy) -> None:
    """Makes the copies the run's own files, if this node was elected for them and not for the head's folder itself."""
    kept = _replica(folder)
    if kept is None or elected != (kept.token, kept.iteration):
        return
    supervision = _supervision(folder)
    if kept.checkpoint is not None and supervision.checkpoints is not None:
        _adopt_checkpoint(_staged(folder) / kept.checkpoint, Path(supervision.checkpoints))
    records = folder / run_folder.REPLICA / FILES
    own = run_folder.read_text(folder / run_folder.EVENTS).splitlines(keepends=True)
    for path in sorted(path for path in records.rglob("*") if path.is_file()):
        run_folder.write_atomic(folder / path.relative_to(records), path.read_bytes())
    known = run_folder.read_text(folder / run_folder.EVENTS)
    with (folder / run_folder.EVENTS).open("a") as events:
        events.writelines(line for line in own if line not in known)


def _adopt_checkpoint(copied: Path, into: Path) -> None:
    """Adds the head's files to this node's part of a checkpoint; sets aside later ones that lack the head's part."""
    here, theirs = into / copied.name, json.loads((copied / checkpoints.MANIFEST).read_bytes())
    for iteration, path in checkpoints.saved_in(into).items():
        if iteration > theirs["iteration"] and not theirs["files"].keys() <= _entries(path).keys():
            checkpoints.set_aside(path)
    here.mkdir(parents=True, exist_ok=True)
    files = {**_entries(here), **theirs["files"]}
    for name in theirs["files"]:
        if (copied / name).is_file():
            with (copied / name).open("rb") as content:
                run_folder.write_atomic(here / name, content)
    manifest = json.dumps({**theirs, "files": dict(sorted(files.items()))}, indent=1) + "\n"
    run_folder.write_atomic(here / checkpoints.MANIFEST, manifest.encode())


def _entries(checkpoint: Path) -> dict[str, Any]:
    try:
        entries: dict[str, Any] = json.loads((checkpoint / checkpoints.MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError):
        return {}
    return entries


def _staged(folder: Path) -> Path:
    return folder / run_folder.REPLICA / run_folder.CHECKPOINTS


def _supervision(folder: Path) -> Supervision:
    return Supervision.from_json((folder / run_folder.SUPERVISION).read_text())


def _replica(folder: Path) -> Replica | None:
    try:
        return decode(Replica, (folder / run_folder.REPLICA / COMPLETE).read_bytes())
    except (OSError, ValueError):
        return None
