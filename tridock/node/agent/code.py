"""Receives files from the head, and lays out a run's code from this node's content-addressed store."""

import hashlib
import json
import os
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.files_below import entries, folder_below, write_below
from tridock.contracts.node_answers import CodeFile, PlacedCode
from tridock.errors import Problem, RequestError


def receive_files(folder: Path, stream: IO[bytes], *, durable: bool = True) -> int:
    """Unpacks plain files below ``folder`` in the archive's order, each atomically; returns their number.

    Raises :class:`RequestError` for a link, a device, an absolute path or one with ``..``.
    """
    count = 0
    for entry, content in entries(stream):
        if content is None:
            raise RequestError(Problem(entry.name, "is not taken", "", "send plain files, by names below the folder"))
        write_below(folder, entry.name, content, durable=durable)
        count += 1
    return count


_KEPT_S: Final = 30 * 86400.0
"""How long the store keeps a file that no run has used."""


def place_code(folder: Path, index: str) -> PlacedCode:
    """Lays out the files of ``index`` (path to :class:`CodeFile`, as JSON) in the run's folder.

    If this node lacks the content of some, it writes nothing and returns their SHA-256. They are then sent to
    ``runs/.code``.
    """
    files = {path: decode(CodeFile, json.dumps(one)) for path, one in json.loads(index).items()}
    store = folder.parent / run_folder.CODE_STORE
    contents = {one.sha256 for one in files.values()}
    if missing := sorted(sha256 for sha256 in contents if not _has(store / sha256, sha256)):
        return PlacedCode(tuple(missing))
    target = folder / run_folder.CODE_COPY
    for made in (store, target):
        made.mkdir(parents=True, exist_ok=True)
    for name, one in files.items():
        if name.endswith("/"):
            with folder_below(target, name, make=True):
                continue
        with (store / one.sha256).open("rb") as content:
            write_below(target, name, content, 0o755 if one.executable else 0o644, durable=False)
    _remove_old(store)
    return PlacedCode(())


def place_run(folder: Path, stream: IO[bytes]) -> PlacedCode:
    """Writes the run's first files, a tar archive, into its folder; then lays out its code as :func:`place_code` does.

    The supervision file is the archive's last: one that is cut between two files reads like a whole one. Raises
    :class:`EOFError` for a part of it.
    """
    try:
        receive_files(folder, stream, durable=False)
        if not (folder / run_folder.SUPERVISION).exists():
            raise EOFError
    except (EOFError, tarfile.ReadError):
        raise EOFError(f"only part of the files for {folder} arrived") from None
    index = folder / run_folder.CODE_INDEX
    return place_code(folder, index.read_text()) if index.exists() else PlacedCode(())


def _has(path: Path, sha256: str) -> bool:
    """Whether the store has the content undamaged; marks it as used."""
    try:
        with path.open("rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest() == sha256
        if whole:
            os.utime(path)
    except OSError:
        return False
    return whole


def _remove_old(store: Path) -> None:
    for path in store.iterdir():
        with suppress(OSError):  # another run removes it too; a folder that somebody has put there
            if time.time() - path.lstat().st_mtime > _KEPT_S:
                path.unlink()
