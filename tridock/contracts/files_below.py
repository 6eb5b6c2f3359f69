"""Files below a folder whose names or contents another machine chose: archives, code, fetched runs.

The folder is the caller's own and may itself be reached through links. Below it no link is followed: every folder on
the way is opened below its parent's descriptor, so that a link that was left there earlier, or appears meanwhile, is
refused.
"""

import errno
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Self

from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError

_MOST_FILES: Final = 500_000
_LONGEST_NAME: Final = 1024
_DEEPEST: Final = 100
_LONGEST_HEADER: Final = 1 << 16
_HEADERS: Final = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


def is_below(name: str) -> bool:
    """Whether the name is that of a file or folder below another: relative, without ``..``, of a usual length."""
    path = PurePosixPath(name)
    usual = 0 < len(path.parts) <= _DEEPEST and len(name) <= _LONGEST_NAME and "\0" not in name
    return usual and not path.is_absolute() and ".." not in path.parts


def _parts(name: str) -> tuple[str, ...]:
    if not is_below(name):
        raise RequestError(Problem(name, "is not taken", "", "send plain files, by names below the folder"))
    return PurePosixPath(name).parts


@contextmanager
def folder_below(folder: Path, name: str, *, make: bool = False) -> Iterator[int]:
    """Yields the descriptor of a folder below ``folder``, or its own for ``.``; ``make`` creates what is missing.

    Raises :class:`RequestError` where a link or a file stands on the way, and :class:`OSError`.
    """
    parts = () if name == "." else _parts(name)
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, part in enumerate(parts, 1):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                where, todo = str(folder.joinpath(*parts[:number])), "remove it or move it away, then try again"
                raise RequestError(Problem(where, "is a link or a file where a folder belongs", "", todo)) from None
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def write_below(
    folder: Path,
    name: str,
    content: bytes | IO[bytes],
    mode: int | None = None,
    *,
    mtime: float | None = None,
    durable: bool = True,
) -> None:
    """Writes a file below ``folder`` as :func:`write_atomic` does; replaces a file or a link of this name.

    Raises :class:`RequestError` for a name that is not below the folder, and where a link stands on the way.
    """
    *folders, last = _parts(name)
    with folder_below(folder, "/".join(folders) or ".", make=True) as inside:
        write_atomic(Path(last), content, mode, durable=durable, dir_fd=inside)
        if mtime is not None:
            with suppress(ValueError, OverflowError):  # not a time
                os.utime(last, (int(mtime), int(mtime)), dir_fd=inside, follow_symlinks=False)


def open_below(folder: Path, name: str) -> IO[bytes]:
    """Opens a regular file below ``folder``. Raises :class:`OSError`, also for a link or a pipe; else as above."""
    *folders, last = _parts(name)
    with folder_below(folder, "/".join(folders) or ".") as inside:
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    if not os.path.isfile(descriptor):  # noqa: PTH113 - a descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(folder / name))
    return os.fdopen(descriptor, "rb")


class _Entry(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in _HEADERS and entry.size > _LONGEST_HEADER:  # tarfile reads it whole
            raise tarfile.ReadError(f"a header of {entry.size:,} bytes")
        return entry


def entries(packed: Path | IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yields the entries of an archive that another machine packed, each with its content if it is a regular file.

    A file whose name ends in ``.gz`` is read with gzip, any other and a stream as it is. Raises
    :class:`tarfile.TarError`. The names are as the archive has them; writes nothing.
    """
    given: Any = {"fileobj": packed, "mode": "r|"}
    if isinstance(packed, Path):
        given = {"name": packed, "mode": "r:gz" if packed.suffix == ".gz" else "r:"}
    with tarfile.open(**given, tarinfo=_Entry) as archive:
        for number, entry in enumerate(archive):
            if number >= _MOST_FILES:
                raise tarfile.ReadError(f"more than {_MOST_FILES:,} files")
            yield entry, archive.extractfile(entry) if entry.isreg() and not entry.issparse() else None
