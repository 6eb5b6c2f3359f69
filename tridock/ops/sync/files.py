"""The files to copy to the nodes, below the project's folder here and below the workspace there."""

import hashlib
import os
import posixpath
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from tridock.contracts.checkpoints import LATEST, LAYOUT, MANIFEST, TRACKER, checkpoint_name, newest
from tridock.contracts.forms import is_index_map
from tridock.contracts.images import SUFFIXES
from tridock.contracts.megatron_weights import megatron_folder
from tridock.contracts.pretrained import CONFIG, DEEPSPEED, HF, NAMES, deepspeed_folder
from tridock.contracts.records import read_object
from tridock.contracts.run_folder import WORKSPACE
from tridock.contracts.tokenizers import TOKENIZER, TOKENIZER_FILES
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.experiment.inputs import tokenizer_folders
from tridock.ops.outgoing import is_inside, secret
from tridock.ops.runs.preflight import data_files, grouped

_HALVES: Final = ((".bin", ".idx"), SUFFIXES)
"""The suffixes of the two files of a data set, of tokens and of images."""
_SUFFIXES: Final = (*(suffix for halves in _HALVES for suffix in halves), ".json")
_READABLE: Final = "make it readable"
_MAKE: Final = "make it first (tridock data preprocess, or tridock data demo), or give another"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file, a folder or a data set's prefix below the project's folder, and the option or field that names it."""

    where: str
    path: str
    names: tuple[str, ...] = ()
    """Patterns of the files in the folder that are wanted, if there are any; empty for all that is below it."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Paths that an experiment reads and that are not here, so that the nodes must have them."""

    where: str
    paths: tuple[str, ...]
    """As the experiment writes them."""
    todo: str
    everywhere: bool = True
    """Whether every node must have them all; otherwise one of them on one node is enough."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A requested file.

    ``name`` is its path below the project's folder and the workspace. ``place`` is the folder that was named, or that
    of a named file; nodes may share it.
    """

    name: str
    source: Path
    place: str

    @property
    def below(self) -> str:
        """Its path below ``place``."""
        return posixpath.relpath(self.name, self.place)

    def stamp(self) -> tuple[int, int]:
        """Returns its size in bytes and its time in nanoseconds. Raises :class:`RequestError` if it is gone."""
        with RequestError.in_place_of(OSError, self.name, "cannot be read", _READABLE):
            status = self.source.stat()
        return status.st_size, status.st_mtime_ns


def choose(project: Path, paths: Sequence[str], more: Iterable[Wanted] = ()) -> tuple[Chosen, ...]:
    """Returns the files of ``paths``: files, folders or data set prefixes below the project's folder.

    Follows links, in a folder those that stay in it. Skips hidden files and Megatron's index maps in folders, but for a
    checkpoint's. Raises :class:`RequestError` with every problem; what a folder has that leads out of it or looks like
    a secret is one, unless a path before names it.
    """
    found: dict[str, Chosen] = {}
    problems: list[Problem] = []
    for wanted in (*(Wanted("--path", path) for path in paths), *more):
        # As written: a data/ that links to a larger disk is still below the project.
        where, text, full = wanted.where, wanted.path, Path(os.path.normpath(project / wanted.path))
        if (full == project and not wanted.names) or not full.is_relative_to(project):
            todo = f"give a file, a folder or a data set's prefix below {project}"
            problems.append(Problem(where, "is outside the project folder", text, todo))
            continue
        place = full if full.is_dir() else full.parent
        for source in _below(full, wanted.names):
            name = source.relative_to(project).as_posix()
            if name not in found:
                problems += _unfit(where, source, name, full)
                found[name] = Chosen(name, source, place.relative_to(project).as_posix())
        if not wanted.names and not any(full == item.source or _is_of(item.source, full) for item in found.values()):
            what = "holds no file" if full.is_dir() else "is not here"
            problems.append(Problem(where, what, text, _MAKE))
        for halves in _HALVES:
            missing = [suffix for suffix in halves if not full.with_name(full.name + suffix).is_file()]
            if not full.exists() and len(missing) == 1:
                problems.append(Problem(where, f"is half of a data set: there is no {missing[0]}", text, _MAKE))
    RequestError.raise_for(problems)
    return tuple(found.values())


def of_experiment(project: Path, config: Path, experiment: Experiment) -> tuple[list[Wanted], list[Absent]]:
    """Returns what an experiment reads: what is here, and what is not.

    That is its data with their manifest, their tokenizer, and the weights or the newest checkpoint of ``train.load``.
    A data set of which a file is not here counts as absent.
    """
    wanted: list[Wanted] = []
    absent: list[Absent] = []
    files = data_files(experiment)
    for field, stem, named in grouped(files):
        names, where = tuple(named), f"{config}: {field}"
        places = [_below_workspace(name) for name in names]
        here = [place for place in places if place is not None and os.path.lexists(project / place)]
        if len(here) < len(names):
            absent.append(Absent(where, names, _OUTSIDE if None in places else _MAKE))
            continue
        wanted += (Wanted(where, place) for place in here)
        manifest = posixpath.basename(f"{stem}.json")
        if field.endswith("data_path"):
            wanted.append(Wanted(where, posixpath.dirname(here[0]) or ".", (manifest,)))
    more, lacking = _of_load(project, f"{config}: train.load", experiment)
    tokenizer = () if experiment.model.is_vision else tokenizer_folders(experiment)
    folders = [it for name in tokenizer if (it := _below_workspace(name)) is not None and (project / it).is_dir()]
    more += (Wanted(f"{config}: data.data_path", it, TOKENIZER_FILES) for it in folders)
    if experiment.train.sample_prompts and not any((project / it / TOKENIZER).is_file() for it in folders):
        paths = tuple(f"{folder}/{TOKENIZER}" for folder in tokenizer)
        todo = "copy the tokenizer of the data there, or leave the prompts out"
        lacking.append(Absent(f"{config}: train.sample_prompts", paths, todo, everywhere=False))
    return [*wanted, *more], [*absent, *lacking]


_OUTSIDE: Final = f"what is mounted there is the hosts' own; name a path below {WORKSPACE} to have it copied"


def _of_load(project: Path, where: str, experiment: Experiment) -> tuple[list[Wanted], list[Absent]]:
    """Like :func:`of_experiment` for ``train.load``, unless it is the folder in which the run itself saves."""
    train = experiment.train
    if train.load is None or train.loads_own_folder:
        return [], []
    kind, folder = train.pretrained or ("", train.load)
    place = _below_workspace(folder)
    found = None if place is None else _read_of(project / place, kind)
    if found is None:
        todo = f"bring a {NAMES[kind]} here" if place is not None else _OUTSIDE
        # The ranks bring a checkpoint to nodes that lack it.
        return [], [Absent(where, (folder,), todo, everywhere=kind != "")]
    return [Wanted(where, path.relative_to(project).as_posix(), names) for path, names in found.items()], []


def _read_of(here: Path, kind: str) -> dict[Path, tuple[str, ...]] | None:
    """Returns the folders that are read of weights or checkpoints, with the names in them; None if nothing is here."""
    if kind == HF:
        return {here: ("*.safetensors", "*.json", *TOKENIZER_FILES)} if (here / CONFIG).is_file() else None
    names: tuple[str, ...] = (LAYOUT,)
    if kind == "" and checkpoint_name(here.name):
        one = here
    elif kind == "" and (last := newest(here)) is not None:
        one = last[1]  # whatever the pointer
    else:
        try:
            one = deepspeed_folder(here) if kind == DEEPSPEED else megatron_folder(here)
        except RequestError:
            return None
        names = (LATEST, TRACKER, LAYOUT, CONFIG, *TOKENIZER_FILES)
    return {one: (), (here.parent if one == here else here): names} if one.is_dir() else None


def _below_workspace(name: str) -> str | None:
    path = posixpath.relpath(posixpath.join(WORKSPACE, name), WORKSPACE)
    return None if path.startswith("..") else path


def _is_of(source: Path, full: Path) -> bool:
    return source.is_relative_to(full) or source in [full.with_name(full.name + suffix) for suffix in _SUFFIXES]


def _below(full: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yields the file itself, a folder's files (of ``names``, if any), or those of a data set with this prefix."""
    if full.is_file():
        yield full
    elif names:
        yield from (it for it in sorted(full.iterdir()) if any(fnmatch(it.name, name) for name in names))
    elif full.is_dir():
        seen, root = set[str](), os.path.realpath(full)
        for parent, folders, files in os.walk(full, followlinks=True):
            seen.add(os.path.realpath(parent))
            kept = (name for name in sorted(folders) if not name.startswith("."))
            places = {name: os.path.realpath(Path(parent, name)) for name in kept}
            outside = [name for name, place in places.items() if not is_inside(place, root)]
            folders[:] = [name for name, place in places.items() if place not in seen and name not in outside]
            hidden = "./" if MANIFEST in files else "."  # a checkpoint's are its own
            for name in sorted((*files, *outside)):
                # The maps that a run needs depend on the run; each node, or `--config`, builds its own.
                if not name.startswith(hidden) and not is_index_map(name):
                    yield Path(parent, name)
    else:
        parts = (full.with_name(full.name + suffix) for suffix in _SUFFIXES)
        yield from (path for path in parts if path.is_file())


def _unfit(where: str, source: Path, name: str, full: Path) -> Iterator[Problem]:
    todo = f"remove it from {full}, or name it itself: --path {shlex.quote(name)}"
    if full.is_dir() and not is_inside(place := os.path.realpath(source), os.path.realpath(full)):
        yield Problem(where, "leads out of its folder by a link", f"{name}, to {place}", todo)
    elif full.is_dir() and secret(name):
        yield Problem(where, "looks like a secret", name, todo)
    elif not source.is_file():
        yield Problem(where, "has a dangling link, or something that is not a file", name, "remove it or fix it")
    elif not os.access(source, os.R_OK):
        yield Problem(where, "cannot be read", name, "make it readable")


def manifest_sha256(file: Chosen) -> str | None:
    """Returns the SHA-256 of a data set's file according to the manifest beside it."""
    if file.source.suffix not in (".bin", ".idx"):
        return None
    return read_object(file.source.with_suffix(".json")).get(f"{file.source.suffix[1:]}_sha256")


def refuse_damage(files: Iterable[Chosen], progress: Callable[[int], object]) -> None:
    """Raises :class:`RequestError` if files do not match their manifests, to avoid copying damage.

    ``progress`` is called with the number of bytes read.
    """
    problems, todo = [], "make the data again, or remove that manifest if it is of other data"
    for file in files:
        digest, wanted = hashlib.sha256(), manifest_sha256(file)
        with (
            RequestError.in_place_of(OSError, file.name, "cannot be read", _READABLE),
            file.source.open("rb") as opened,
        ):
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
                progress(len(chunk))
        if digest.hexdigest() != wanted:
            what = f"is not what {file.source.with_suffix('.json').name} beside it says, which has SHA-256 {wanted}"
            problems.append(Problem(file.name, what, digest.hexdigest(), todo))
    RequestError.raise_for(problems)


_CHUNK: Final = 1 << 20
