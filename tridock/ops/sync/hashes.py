"""SHA-256 of the operator's files, kept beside the cluster's keys: a file that has not changed is read once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tridock.cluster.settings import STATE
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError
from tridock.ops.sync.files import Chosen, DataFile

_CHUNK: Final = 1 << 20
_KEPT: Final = "data-hashes.json"
# A file that changed in the very moment of its last time stamp looks unchanged; later than this none can.
_SETTLED_NS: Final = 2_000_000_000


def fingerprint(project: Path, chosen: Iterable[Chosen], progress: Callable[[int], object]) -> tuple[DataFile, ...]:
    """Size and hash of each file; ``progress`` is told of bytes that are done with.

    Raises :class:`RequestError` where a data set is not what its own manifest says: damage must not spread.
    """
    path = project / STATE / _KEPT
    known = _read(path)
    before = dict(known)
    try:
        files = tuple(_file(item, known, progress) for item in chosen)
    finally:
        if known != before:
            with suppress(OSError):
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_atomic(path, json.dumps(known).encode(), 0o600)
    if problems := [problem for file in files for problem in _damage(file)]:
        raise RequestError(problems)
    return files


def _file(item: Chosen, known: dict[str, Any], progress: Callable[[int], object]) -> DataFile:
    started = time.time_ns()
    try:
        with item.source.open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            key = str(item.source.resolve())
            kept = known.get(key)
            if kept is not None and kept[:-1] == stamp:
                digest = str(kept[-1])
                progress(status.st_size)
            else:
                sha256 = hashlib.sha256()
                while chunk := file.read(_CHUNK):
                    sha256.update(chunk)
                    progress(len(chunk))
                digest = sha256.hexdigest()
                if status.st_ctime_ns < started - _SETTLED_NS:
                    known[key] = [*stamp, digest]
    except OSError as error:
        words = error.strerror or str(error)
        raise RequestError(Problem(item.name, "cannot be read", words, "make it readable")) from None
    return DataFile(item.name, item.source, item.place, status.st_size, status.st_mtime_ns, digest)


def _damage(file: DataFile) -> list[Problem]:
    if file.source.suffix not in (".bin", ".idx"):
        return []
    manifest = _read(file.source.with_suffix(".json"))
    wanted = manifest.get(f"{file.source.suffix[1:]}_sha256")
    if wanted is None or wanted == file.sha256:
        return []
    what = f"is not what {file.source.with_suffix('.json').name} beside it says, which has SHA-256 {wanted}"
    return [
        Problem(file.name, what, file.sha256, "make the data again, or remove that manifest if it is of other data")
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
