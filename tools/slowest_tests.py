"""Prints how long each test suite took and which tests were the slowest, from pytest's JUnit files.

python tools/slowest_tests.py FILE.xml...
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

COUNT = 10


def main(paths: list[str]) -> None:
    tests: list[tuple[float, str, str]] = []
    for path in map(Path, paths):
        (suite,) = ElementTree.parse(path).getroot().iter("testsuite")  # noqa: S314  (pytest has written it)
        print(f"{float(suite.attrib['time']):7.1f} s  {path.stem}: {suite.attrib['tests']} tests")
        for case in suite.iter("testcase"):
            tests.append((float(case.attrib["time"]), case.attrib["classname"], case.attrib["name"]))
    print(f"the {COUNT} slowest tests, with their fixtures:")
    for seconds, module, name in sorted(tests, reverse=True)[:COUNT]:
        print(f"{seconds:7.1f} s  {module.removeprefix('tests.')}::{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
