"""`make test-full PART=2/4`: every fourth test file from the second on; hooks that conftest.py imports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest


def part_of(files: Iterable[Path], part: str) -> set[Path]:
    """The files of `part`, as "2/4". Each file is in one part of a session that collects the same files."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"--part: got {part!r}, wants NUMBER/PARTS, as 2/4")
    return set(sorted(set(files))[int(match[1]) - 1 :: int(match[2])])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="NUMBER/PARTS", help="run this part of the test files, as 2/4")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("part")
    if not part:
        return
    try:
        files = part_of((item.path for item in items), part)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
    items[:] = [item for item in items if item.path in files]
