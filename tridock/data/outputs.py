"""Refuses output files that would replace an input, another output, or a path that is not a file."""

import os
from collections.abc import Iterable
from pathlib import Path

from tridock.errors import Problem, RequestError


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
    if problems:
        raise RequestError(problems)


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
