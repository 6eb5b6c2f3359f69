"""Which data sets a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tridock.data.indexed_dataset import bin_path, idx_path
from tridock.errors import Problem, RequestError


def find_prefixes(inputs: Sequence[str]) -> list[Path]:
    """Prefixes in the order given, and those of a folder by name, hidden ones left out.

    A file without its partner counts too: it is told when it is opened. Raises :class:`RequestError` with every folder
    that holds none.
    """
    found: list[Path] = []
    problems: list[Problem] = []
    for given in inputs:
        path = Path(given)
        if not path.is_dir() or (path.name and (bin_path(path).is_file() or idx_path(path).is_file())):
            found.append(path)
            continue
        names = {file.stem for file in path.iterdir() if file.suffix in (".bin", ".idx") and file.is_file()}
        inside = sorted(name for name in names if not name.startswith("."))
        if not inside:
            todo = "give prefixes of data sets, or folders that hold some"
            problems.append(Problem(given, "holds no data set", "no .bin and .idx", todo))
        found += [path / name for name in inside]
    if problems:
        raise RequestError(problems)
    return found


def check_output(prefix: Path) -> None:
    """Raises :class:`RequestError` where files cannot be named after it."""
    if not prefix.name or prefix.name == "..":
        todo = "give a folder and a name: data/all"
        raise RequestError(Problem("--output-prefix", "names no file", str(prefix), todo))
