"""Pointers of Git LFS: what a git checkout has in place of a large file until Git LFS has fetched it.

Source: ``docs/spec.md`` of github.com/git-lfs/git-lfs. A pointer is shorter than 1024 bytes; its first line is the
version, then follow keys in their order, among them ``oid sha256:…`` and ``size N``.
"""

import re
import shlex
from pathlib import Path
from typing import Final

from tridock.errors import Problem, RequestError

_BEGIN: Final = b"version https://git-lfs.github.com/spec/"
_SIZE: Final = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)
_LONGEST: Final = 1024
_SPECIAL: Final = re.compile(r"[,*\[\]\\]")
"""What separates or begins patterns of ``--include``: a ``?`` stands for any one character."""


def pointer_problem(file: Path | str, start: bytes) -> Problem | None:
    """Returns the problem of a file that is a pointer, by the bytes at its start; None of any other."""
    if not start.startswith(_BEGIN):
        return None
    size, path = _SIZE.search(start[:_LONGEST]), Path(file)
    got = f"a pointer to {int(size[1]):,} bytes" if size else ""
    pull = shlex.join(["git", "-C", str(path.parent), "lfs", "pull", "--include", _SPECIAL.sub("?", path.name)])
    return Problem(str(file), "is a pointer of Git LFS, not the file itself", got, f"fetch it: {pull}")


def refuse_pointer(file: Path, start: bytes | None = None) -> None:
    """Raises :class:`RequestError` if the file is a pointer, and OSError if it cannot be read.

    ``start``: its first bytes, if they are known.
    """
    if start is None:
        with file.open("rb") as stream:
            start = stream.read(_LONGEST)
    if (problem := pointer_problem(file, start)) is not None:
        raise RequestError(problem)
