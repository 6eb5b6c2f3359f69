"""Ends `make test`: runs what failed once more, alone, and says in its last lines how all of it went.

python tools/test_verdict.py [--so-far] FOLDER BLOCK...

A block of tests is BLOCK.xml and BLOCK.json in the folder: pytest's JUnit file and tests/recorded.py's record. Tests
that failed beside others run again, one at a time with nothing beside them. If they pass then, the exit code is 0, and
the last lines name them as "passed only alone". It is 1 if one fails again, if more than MOST_AGAIN failed, or if a
block has no record, because it did not come to its end. ``--so-far``: the time is up, and nothing runs again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

MOST_AGAIN = 10
_SLOWEST = 10
_ENDED = (0, 1, 5)
"""Exit codes of pytest: all passed, some failed, none selected."""


@dataclass(frozen=True)
class Block:
    name: str
    exit_code: int | None = None
    """pytest's; None if it did not come to its end."""
    failed: dict[str, str] | None = None
    """The end of the error of each failed test, by its id."""
    tests: int = 0
    skipped: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0
    slowest: tuple[tuple[float, str], ...] = ()

    @classmethod
    def read(cls, folder: Path, name: str) -> Block:
        try:
            record = json.loads((folder / f"{name}.json").read_text())
            root = ElementTree.parse(folder / f"{name}.xml").getroot()  # noqa: S314  (pytest has written it)
        except (OSError, ValueError, ElementTree.ParseError):
            return cls(name)
        (suite,) = root.iter("testsuite")
        tests, skipped, seconds = suite.attrib["tests"], suite.attrib["skipped"], suite.attrib["time"]
        cases = [
            (float(case.attrib["time"]), f"{case.attrib['classname'].removeprefix('tests.')}::{case.attrib['name']}")
            for case in suite.iter("testcase")
        ]
        return cls(name, **record, tests=int(tests), skipped=int(skipped), seconds=float(seconds), slowest=(*cases,))

    @property
    def ended(self) -> bool:
        return self.exit_code in _ENDED and (self.exit_code == 1) == bool(self.failed)

    def __str__(self) -> str:
        if self.exit_code is None:
            return f"{self.name:12} did not come to its end"
        how = "" if self.ended else f"; pytest ended with exit code {self.exit_code}"
        return (
            f"{self.name:12} {self.tests:5} tests, {len(self.failed or ()):3} failed, {self.skipped:3} skipped, "
            f"{self.seconds / 60:5.1f} min, {self.core_seconds:6.0f} core seconds{how}"
        )


def again(folder: Path, ids: list[str]) -> Block:
    """Runs tests one at a time. A test's limit is its own: its fixtures may have to make what others shared."""
    options = ("-m", "", "-o", "timeout_func_only=true", f"--junitxml={folder}/alone.xml")
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    subprocess.run((sys.executable, "-m", "pytest", *options, *ids), env=env, check=False)
    return Block.read(folder, "alone")


def _named(failed: dict[str, str], how: str) -> None:
    for test, said in failed.items():
        print(f"{how}: {test}")
        print(textwrap.indent("\n".join(line[:200] for line in said.splitlines()), "    "))


def main(folder: Path, names: list[str], *, most_again: int) -> int:
    blocks = [Block.read(folder, name) for name in names]
    first = {test: said for block in blocks for test, said in (block.failed or {}).items()}
    green, passed_alone, failed = all(block.ended for block in blocks), dict[str, str](), first
    if 0 < len(first) <= most_again:
        print(f"\nonce more, one at a time: {', '.join(first)}", flush=True)
        alone = again(folder, [*first])
        if alone.exit_code in (0, 1):
            failed = alone.failed or {}
            passed_alone = {test: said for test, said in first.items() if test not in failed}
        blocks.append(alone)
    green = green and not failed and any(block.tests for block in blocks)

    print(f"\nthe {_SLOWEST} slowest tests, with their fixtures:")
    for seconds, test in sorted((case for block in blocks for case in block.slowest), reverse=True)[:_SLOWEST]:
        print(f"{seconds:7.1f} s  {test}")
    load, free = " ".join(f"{it:.1f}" for it in os.getloadavg()), shutil.disk_usage(folder).free >> 30
    print(f"load {load}; {free} GB of disk free\n", *blocks, "", sep="\n")
    _named(passed_alone, "passed only alone")
    _named(failed, "FAILED")
    if not any(block.tests for block in blocks):
        print("no test was selected")
    tests, skipped = (sum(getattr(block, what) for block in blocks[: len(names)]) for what in ("tests", "skipped"))
    print(f"tests: {'green' if green else 'RED'}")
    print(f"{tests - skipped - len(failed)} passed, {len(failed)} failed, {skipped} skipped")
    return 0 if green else 1


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--so-far"]
    sys.exit(main(Path(words[0]), words[1:], most_again=MOST_AGAIN if words == sys.argv[1:] else 0))
