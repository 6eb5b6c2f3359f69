"""The files to copy to the hosts, below the project's folder here and below the workspace there, with their SHA-256.

Hashes are kept beside the cluster's keys: an unchanged file is read once.
"""

import hashlib
import json
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.cluster.settings import STATE
from tridock.contracts.records import read_object
from tridock.contracts.run_folder import WORKSPACE, write_atomic
from tridock.errors import Problem, RequestError
from tridock.experiment.inputs import IMAGE_SUFFIXES

_HALVES: Final = ((".bin", ".idx"), IMAGE_SUFFIXES)
"""The suffixes of the two files of a data set, of tokens and of images."""
_SUFFIXES: Final = (*(suffix for halves in _HALVES for suffix in halves), ".json")
# The maps that a run needs depend on the run; each node, or `--config`, builds its own.
_INDEX_MAP: Final = re.compile(r".*_indexmap(_.*\.npy|\.sha256)")
_MAKE: Final = "make it first (tridock data preprocess, or tridock data demo), or give another"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A requested file.

    ``name`` is its path below the project's folder and the workspace. ``place`` is the remote folder that identifies a
    shared mount.
    """

    name: str
    source: Path
    place: str


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file with the fingerprint of its content."""

    name: str
    source: Path
    place: str
    size: int
    mtime_ns: int
    sha256: str


def choose(project: Path, paths: Sequence[str]) -> tuple[Chosen, ...]:
    """Returns the files of ``paths``: files, folders or data set prefixes below the project's folder.

    Follows links. Skips hidden files and Megatron's index maps in folders. Raises :class:`RequestError` with every
    problem.
    """
    return _chosen(project, [("--path", path) for path in paths])


def of_experiment(project: Path, config: Path, data_path: str, files: Mapping[str, str]) -> tuple[Chosen, ...]:
    """Returns the files that an experiment reads, and the data set's manifest if there is one.

    ``files`` maps each path, as the experiment writes it, to the field that names it.
    """
    found: list[tuple[str, str]] = []
    problems: list[Problem] = []
    for name, field in files.items():
        below = _below_workspace(name)
        if below is None:
            todo = f"what is mounted there is the hosts' own; name a path below {WORKSPACE} to have it copied"
            problems.append(Problem(f"{config}: {field}", "is outside the workspace", name, todo))
        else:
            found.append((f"{config}: {field}", below))
    if problems:
        raise RequestError(problems)
    manifest = f"{_below_workspace(data_path)}.json"
    optional = [(f"{config}: data.data_path", manifest)] if (project / manifest).is_file() else []
    return _chosen(project, [*found, *optional])


def _below_workspace(name: str) -> str | None:
    path = posixpath.relpath(posixpath.join(WORKSPACE, name), WORKSPACE)
    return None if path.startswith("..") else path


def _chosen(project: Path, wanted: Iterable[tuple[str, str]]) -> tuple[Chosen, ...]:
    found: dict[str, Chosen] = {}
    problems: list[Problem] = []
    for where, text in wanted:
        # As written: a data/ that links to a larger disk is still below the project.
        full = Path(os.path.normpath(project / text))
        if full == project or not full.is_relative_to(project):
            todo = f"give a file, a folder or a data set's prefix below {project}"
            problems.append(Problem(where, "is outside the project folder", text, todo))
            continue
        place = full if full.is_dir() else full.parent
        for source in _below(full):
            name = source.relative_to(project).as_posix()
            problems += _unfit(where, source, name)
            found.setdefault(name, Chosen(name, source, place.relative_to(project).as_posix()))
        if not any(full == item.source or _is_of(item.source, full) for item in found.values()):
            what = "holds no file" if full.is_dir() else "is not here"
            problems.append(Problem(where, what, text, _MAKE))
        for halves in _HALVES:
            missing = [suffix for suffix in halves if not full.with_name(full.name + suffix).is_file()]
            if not full.exists() and len(missing) == 1:
                problems.append(Problem(where, f"is half of a data set: there is no {missing[0]}", text, _MAKE))
    if problems:
        raise RequestError(problems)
    return tuple(found.values())


def _is_of(source: Path, full: Path) -> bool:
    return source.is_relative_to(full) or source in [full.with_name(full.name + suffix) for suffix in _SUFFIXES]


def _below(full: Path) -> Iterator[Path]:
    """Yields the file itself, a folder's files, or those of a data set with this prefix."""
    if full.is_file():
        yield full
    elif full.is_dir():
        seen: set[str] = set()
        for parent, folders, files in os.walk(full, followlinks=True):
            seen.add(os.path.realpath(parent))
            kept = (name for name in sorted(folders) if not name.startswith("."))
            folders[:] = [name for name in kept if os.path.realpath(Path(parent, name)) not in seen]
            for name in sorted(files):
                if not name.startswith(".") and not _INDEX_MAP.fullmatch(name):
                    yield Path(parent, name)
    else:
        parts = (full.with_name(full.name + suffix) for suffix in _SUFFIXES)
        yield from (path for path in parts if path.is_file())


def _unfit(where: str, source: Path, name: str) -> Iterator[Problem]:
    if any(sign in name for sign in "\n\t"):
        yield Problem(where, "has a file with a tab or a line break in its name", repr(name), "rename it")
    elif not source.is_file():
        yield Problem(where, "has a dangling link, or something that is not a file", name, "remove it or fix it")
    elif not os.access(source, os.R_OK):
        yield Problem(where, "cannot be read", name, "make it readable")


_CHUNK: Final = 1 << 20
_KEPT: Final = "data-hashes.json"
# A file changed this recently may change again with the same time stamp: its hash is not reused.
_SETTLED_NS: Final = 2_000_000_000


def fingerprint(project: Path, chosen: Iterable[Chosen], progress: Callable[[int], object]) -> tuple[DataFile, ...]:
    """Returns each file's size and hash; ``progress`` gets the number of bytes done.

    Raises :class:`RequestError` if a data set does not match its own manifest, to avoid copying damage.
    """
    path = project / STATE / _KEPT
    known = read_object(path)
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
        reason = error.strerror or str(error)
        raise RequestError(Problem(item.name, "cannot be read", reason, "make it readable")) from None
    return DataFile(item.name, item.source, item.place, status.st_size, status.st_mtime_ns, digest)


def _damage(file: DataFile) -> list[Problem]:
    if file.source.suffix not in (".bin", ".idx"):
        return []
    manifest = read_object(file.source.with_suffix(".json"))
    wanted = manifest.get(f"{file.source.suffix[1:]}_sha256")
    if wanted is None or wanted == file.sha256:
        return []
    what = f"is not what {file.source.with_suffix('.json').name} beside it says, which has SHA-256 {wanted}"
    return [
        Problem(file.name, what, file.sha256, "make the data again, or remove that manifest if it is of other data")
    ]
