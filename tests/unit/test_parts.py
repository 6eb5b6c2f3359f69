"""Parts of the tests, as `make test-full PART=2/4` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import part_of

FILES = [Path(f"test_{letter}.py") for letter in "gcabfed"]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 9])
def test_each_file_is_in_one_part(parts: int) -> None:
    cut = [part_of(FILES, f"{number}/{parts}") for number in range(1, parts + 1)]
    assert sorted(file for part in cut for file in part) == sorted(FILES)
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize("part", ["", "0/4", "5/4", "2", "2/0", "a/b", "-1/4", "2/4/1", "1.5/4"])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="as 2/4"):
        part_of(FILES, part)


def test_pytest_runs_a_part_of_the_files() -> None:
    files = ["tests/unit/test_parts.py", "tests/unit/test_gpus.py"]

    def collected(part: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--part", part, *files]
        return subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)

    first, second = collected("1/2").stdout, collected("2/2").stdout
    assert "test_gpus.py::" in first
    assert "test_parts.py::" not in first
    assert "test_parts.py::" in second
    assert "test_gpus.py::" not in second
    refused = collected("3/2")
    assert refused.returncode == 4
    assert "--part: got '3/2', wants NUMBER/PARTS, as 2/4" in refused.stderr
