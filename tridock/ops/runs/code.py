"""Your code for a run: which files belong to it, and which of them each node lacks."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.contracts import run_folder
from tridock.contracts.codec import decode, encode
from tridock.contracts.node_answers import CodeFile
from tridock.contracts.records import read_object
from tridock.errors import Problem, RequestError
from tridock.ops.runs.provenance import git_output

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE: Final = ".tridockignore"
_NEVER: Final = (".git/", "__pycache__/", ".venv/", "/runs/")
_MOST_BYTES: Final = 500_000_000
_DIFF_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Code:
    """The files of a folder, by their paths in it."""

    folder: Path
    files: Mapping[str, CodeFile]
    size: int
    """The total size in bytes."""
    origin: Mapping[str, object]
    """The code's origin, for the run's manifest."""
    diff: bytes | None = None
    """The changes since the commit as ``git diff`` shows them; None if there are none or they are too long."""

    @property
    def index(self) -> str:
        """The index that ``place-code`` reads."""
        return encode(dict(self.files))


def read_code(folder: Path) -> Code:
    """Returns the files of the folder to send: in a git repository those that git does not ignore, else all; without
    caches, virtual environments, runs, and what ``.tridockignore`` (in .gitignore's syntax) lists.

    Raises :class:`RequestError` if it is no folder, or too large to be code.
    """
    if not folder.is_dir():
        raise RequestError(
            Problem(str(folder), "is not a folder with code", "", "give the program's folder: --workdir")
        )
    try:
        return _read(folder)
    except OSError as error:
        got, todo = error.strerror or str(error), f"make it readable, or name it in {folder / IGNORE_FILE}"
        raise RequestError(Problem(str(error.filename or folder), "cannot be read", got, todo)) from None


def _read(folder: Path) -> Code:
    paths = {name: folder / name for name in sorted(_names(folder))}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    if (total := sum(sizes.values())) > _MOST_BYTES:
        largest = ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:3])
        got = f"{total / 1e9:.1f} GB; the largest files are {largest}"
        todo = f"name what is no code in {folder / IGNORE_FILE}, and copy data with tridock data sync"
        raise RequestError(Problem(str(folder), f"holds more than {_MOST_BYTES / 1e6:.0f} MB of code", got, todo))
    files = {name: CodeFile(_sha256(path), os.access(path, os.X_OK)) for name, path in paths.items()}
    text = git_output(folder, "diff", "HEAD", "--", ".")
    diff = f"{text}\n".encode(errors="surrogateescape") if text and len(text) <= _DIFF_BYTES else None
    return Code(folder, files, total, _origin(folder, files, total), diff)


def _origin(folder: Path, files: Mapping[str, CodeFile], size: int) -> dict[str, object]:
    commit, status = (git_output(folder, *argv) for argv in (("rev-parse", "HEAD"), ("status", "--porcelain", ".")))
    return {
        "folder": str(folder.resolve()),
        "sha256": hashlib.sha256("".join(f"{it.sha256} {name}\n" for name, it in files.items()).encode()).hexdigest(),
        "files": len(files),
        "bytes": size,
        "git_commit": commit,
        "git_dirty": None if status is None else status != "",
    }


def code_of_run(run: Path) -> Code:
    """Returns the code that a run started with, from its folder. Raises :class:`RequestError` if it is unknown."""
    index = read_object(run / run_folder.CODE_INDEX)
    origin = read_object(run / run_folder.MANIFEST).get("code") or {}
    if len(index) != origin.get("files"):  # a program in the image may have no code files
        todo = "fetch the run's folder whole: tridock fetch"
        raise RequestError(Problem(str(run / run_folder.CODE_INDEX), "cannot be read", "", todo))
    files = {name: decode(CodeFile, json.dumps(entry)) for name, entry in index.items()}
    diff = run / run_folder.CODE_DIFF
    return Code(
        run / run_folder.CODE_COPY,
        files,
        int(origin.get("bytes", 0)),
        origin,
        diff.read_bytes() if diff.is_file() else None,
    )


def _names(folder: Path) -> Iterator[str]:
    from pathspec import GitIgnoreSpec  # from the operator's environment; other engines' jobs do not need it

    ignored = GitIgnoreSpec.from_lines(_NEVER)
    own = folder / IGNORE_FILE
    listed = GitIgnoreSpec.from_lines(own.read_text().splitlines() if own.is_file() else ())
    for name in _candidates(folder, ignored):
        path = folder / name
        if path.is_file() and not ignored.match_file(name) and not listed.match_file(name):
            yield name


def _candidates(folder: Path, ignored: GitIgnoreSpec) -> Iterator[str]:
    tracked = git_output(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if tracked is not None:
        yield from filter(None, tracked.split("\0"))
        return
    for root, folders, names in os.walk(folder):
        inside = Path(root).relative_to(folder)
        folders[:] = [name for name in folders if not ignored.match_file(f"{inside / name}/")]
        yield from (str(inside / name) for name in names)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


ARCHIVE_END: Final = bytes(2 * tarfile.BLOCKSIZE)


def archive_member(name: str, content: bytes) -> bytes:
    """Returns a file's part of a tar archive."""
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf() + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def archive_of(files: Mapping[str, Path]) -> Iterator[bytes]:
    """Yields a tar archive of the files in chunks."""
    for name, path in files.items():
        yield archive_member(name, path.read_bytes())
    yield ARCHIVE_END
