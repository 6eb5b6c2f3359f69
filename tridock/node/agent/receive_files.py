"""Receives the files that the head sends to a node, as a tar archive on standard input."""

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from tridock.errors import Problem, RequestError


def receive_files(folder: Path, stream: IO[bytes]) -> int:
    """Unpacks plain files below ``folder`` in the archive's order, each atomically; returns their number.

    Raises :class:`RequestError` for a link, a device, an absolute path or one with ``..``.
    """
    count = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                raise RequestError(
                    Problem(member.name, "is not taken", "", "send plain files, by names below the folder")
                )
            content = archive.extractfile(member)
            assert content is not None
            _write(folder / path, content)
            count += 1
    return count


def _write(path: Path, content: IO[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
