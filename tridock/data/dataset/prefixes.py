"""Finds and opens the data sets on a command line, and refuses outputs that would replace something else."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tridock.data.dataset.indexed_dataset import IndexedDataset, bin_path, idx_path
from tridock.data.dataset.manifest import DatasetManifest, manifest_path, read_manifest
from tridock.data.dataset.verify import index_problems
from tridock.errors import Problem, RequestError


def find_prefixes(inputs: Sequence[str]) -> list[Path]:
    """Returns prefixes in the order given; those in a folder sorted by name, without hidden ones.

    A .bin without .idx counts too, and fails when it is opened. Raises :class:`RequestError` with every folder that
    contains none.
    """
    found: list[Path] = []
    problems: list[Problem] = []
    for given in inputs:
        path = Path(given)
        if not given:
            problems.append(Problem("the prefix", "is empty", "", "give prefixes of data sets, or folders"))
            continue
        if not path.is_dir() or (path.name and (bin_path(path).is_file() or idx_path(path).is_file())):
            found.append(path)
            continue
        names = {file.stem for file in path.iterdir() if file.suffix in (".bin", ".idx") and file.is_file()}
        inside = sorted(name for name in names if not name.startswith("."))
        if not inside:
            todo = "give prefixes of data sets, or folders that contain some"
            problems.append(Problem(given, "contains no data set", "no .bin and .idx", todo))
        found += [path / name for name in inside]
    RequestError.raise_for(problems)
    return found


def open_datasets(prefixes: Sequence[Path]) -> tuple[list[IndexedDataset], list[DatasetManifest | None]]:
    """Returns data sets and manifests. Raises :class:`RequestError` with the problems of all of them."""
    datasets: list[IndexedDataset] = []
    manifests: list[DatasetManifest | None] = []
    problems: list[Problem] = []
    for prefix in prefixes:
        try:
            dataset, manifest = IndexedDataset(prefix), read_manifest(prefix)
        except RequestError as error:
            problems += error.problems
            continue
        problems += index_problems(dataset)
        counted = None if manifest is None else (manifest.documents, manifest.tokens)
        there = dataset.documents, len(dataset.tokens)
        if counted is not None and counted != there:
            what = f"belongs to other data: there are {there[0]} documents of {there[1]} tokens"
            got, todo = f"{counted[0]} documents of {counted[1]} tokens", "copy all three files again"
            problems.append(Problem(str(manifest_path(prefix)), what, got, todo))
        datasets.append(dataset)
        manifests.append(manifest)
    RequestError.raise_for(problems)
    return datasets, manifests


def output_problems(prefix: Path) -> Iterator[Problem]:
    """Yields a problem if the prefix has no file name."""
    if not prefix.name or prefix.name == "..":
        todo = "give a folder and a name: data/all"
        yield Problem("--output-prefix", "names no file", str(prefix), todo)


def check_outputs(outputs: Iterable[tuple[str, Path]], inputs: Iterable[Path], work: Path | None = None) -> None:
    """Raises :class:`RequestError` with every problem. Each output is a path with the option that names it.

    ``work`` is the folder of the run's unfinished work.
    """
    inputs = list(inputs)
    read = {os.path.realpath(path) for path in inputs}
    files = {identity for path in inputs if (identity := _identity(path))}
    written: set[str] = set()
    problems: list[Problem] = []
    for option, path in outputs:
        place = os.path.realpath(path)
        if work is not None and Path(place).is_relative_to(os.path.realpath(work)):
            what = "is in the folder of the run's unfinished work"
        elif (path.exists() and not path.is_file()) or _is_of_a_process(path):
            what = "is a folder, device or pipe, not a file"
        elif place in read or _identity(path) in files:
            what = "would overwrite an input"
        elif place in written:
            what = "would overwrite another output"
        else:
            written.add(place)
            continue
        problems.append(Problem(option, what, str(path), "name another file"))
    RequestError.raise_for(problems)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what is equal for all names of a file: hard links, bind mounts, other case; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_of_a_process(path: Path) -> bool:
    """Whether a name, such as /dev/stdout, stands for a file that a process has open."""
    folder = path.parent.resolve()
    return folder in (Path("/dev"), Path("/proc")) or Path("/proc") in folder.parents
