"""Receives the files that the head sends to a node, as a tar archive on standard input."""

import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError


def receive_files(folder: Path, stream: IO[bytes], *, durable: bool = True) -> int:
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
            write_atomic(folder / path, content, durable=durable)
            count += 1
    return count
