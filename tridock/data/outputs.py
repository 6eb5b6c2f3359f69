"""Refuses output files that would replace an input, another output, or a path that is not a file."""

import os
from collections.abc import Iterable
from pathlib import Path

from tridock.errors import Problem, RequestError


def check_outputs(outputs: Iterable[tuple[str, Path]], inputs: Iterable[Path]) -> None:
    """Raises :class:`RequestError` with every problem. Each output is a path with the option that names it."""
    read = {os.path.realpath(path) for path in inputs}
    written: set[str] = set()
    problems: list[Problem] = []
    for option, path in outputs:
        place = os.path.realpath(path)
        if path.exists() and not path.is_file():
            what = "is a folder, device or pipe, not a file"
        elif place in read:
            what = "would overwrite an input"
        elif place in written:
            what = "would overwrite another output"
        else:
            written.add(place)
            continue
        problems.append(Problem(option, what, str(path), "name another file"))
    if problems:
        raise RequestError(problems)
