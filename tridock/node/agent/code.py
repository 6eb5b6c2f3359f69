"""Lays out a run's code from this node's content-addressed store."""

import hashlib
import json
import os
import secrets
import shutil
import tarfile
import time
from pathlib import Path, PurePosixPath
from typing import IO, Final

from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import CodeFile, PlacedCode
from tridock.errors import Problem, RequestError
from tridock.node.agent.receive_files import receive_files

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
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise RequestError(Problem(name, "is not taken", "", "send files by names below the folder"))
        _place(store / one.sha256, target / path, 0o755 if one.executable else 0o644)
    _remove_old(store)
    return PlacedCode(())


def place_run(folder: Path, stream: IO[bytes]) -> PlacedCode:
    """Writes the run's first files, a tar archive, into its folder; then lays out the code as :func:`place_code` does.

    The index is the archive's last file: an archive that is cut between two files reads like a whole one. Raises
    :class:`EOFError` for a part of it.
    """
    index = folder / run_folder.CODE_INDEX
    try:
        receive_files(folder, stream, durable=False)
        if not index.exists():
            raise EOFError
    except (EOFError, tarfile.ReadError):
        raise EOFError(f"only part of the files for {folder} arrived") from None
    return place_code(folder, index.read_text())


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


def _place(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    shutil.copyfile(source, partial)
    partial.chmod(mode)
    partial.replace(target)


def _remove_old(store: Path) -> None:
    for path in store.iterdir():
        if time.time() - path.stat().st_mtime > _KEPT_S:
            path.unlink(missing_ok=True)
