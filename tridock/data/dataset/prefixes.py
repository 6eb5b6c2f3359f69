"""Finds and opens the data sets on a command line."""

from collections.abc import Iterator, Sequence
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
    if problems:
        raise RequestError(problems)
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
        problems += index_problems(dataset.index)
        counted = None if manifest is None else (manifest.documents, manifest.tokens)
        there = dataset.documents, len(dataset.tokens)
        if counted is not None and counted != there:
            what = f"belongs to other data: there are {there[0]} documents of {there[1]} tokens"
            got, todo = f"{counted[0]} documents of {counted[1]} tokens", "copy all three files again"
            problems.append(Problem(str(manifest_path(prefix)), what, got, todo))
        datasets.append(dataset)
        manifests.append(manifest)
    if problems:
        raise RequestError(problems)
    return datasets, manifests


def output_problems(prefix: Path) -> Iterator[Problem]:
    """Yields a problem if the prefix has no file name."""
    if not prefix.name or prefix.name == "..":
        todo = "give a folder and a name: data/all"
        yield Problem("--output-prefix", "names no file", str(prefix), todo)
