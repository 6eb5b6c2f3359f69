"""Ends `make test`: runs what failed once more, alone, and says in its last lines how all of it went.

python tools/test_verdict.py [--so-far] FOLDER BLOCK...

The folder has pytest's report log of each block of tests, BLOCK.jsonl, which pytest writes test by test, and at its end
BLOCK.cores, the core seconds of the machine meanwhile. Tests that failed beside others run again, one at a time with
nothing beside them. If they pass then, the exit code is 0, and the last lines name them as "passed only alone". It is
1 if one fails again, if more than MOST_AGAIN failed, or if a block did not come to its end. ``--so-far``: the time is
up, and nothing runs again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_AGAIN = 10
_SLOWEST = 10
_ENDED = (0, 1, 5)
"""Exit codes of pytest: all passed, some failed, none selected."""
_LINES = 6


def _said(report: dict[str, Any]) -> str:
    """The first and the last lines of a failure, and its place if pytest knows it."""
    error = report["longrepr"]
    crash = error["reprcrash"] if isinstance(error, dict) else None
    if crash is None:  # a worker that crashed, a file that cannot be imported, a traceback that is hidden
        text = error if isinstance(error, str) else error["reprtraceback"]["reprentries"][-1]["data"]["lines"]
        return "\n".join((text.splitlines() if isinstance(text, str) else text)[-_LINES:])
    lines = crash["message"].splitlines()
    if len(lines) > 2 * _LINES:  # what a command printed before its time was up is at the end
        lines[_LINES:-_LINES] = ["…"]
    return "\n".join([*lines, f"{crash['path']}:{crash['lineno']}"])


@dataclass(frozen=True)
class Block:
    name: str
    exit_code: int | None = None
    """pytest's; None if it did not come to its end."""
    failed: dict[str, str] = field(default_factory=dict)
    """What each failed test said, by its id."""
    skipped: int = 0
    span_s: float = 0.0
    """From the first test's begin to the last one's end."""
    used: str = ""
    """The core seconds of the machine meanwhile, as text; empty if it did not come to its end."""
    tests: Counter[str] = field(default_factory=Counter)
    """The seconds of each test that has ended, with its fixtures."""

    @classmethod
    def read(cls, folder: Path, name: str) -> Block:
        path = folder / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]  # pytest may have been killed in the last
        exit_code = next((it["exitstatus"] for it in events if it["$report_type"] == "SessionFinish"), None)
        failed, skipped, ended = dict[str, str](), set[str](), set[str]()
        seconds, times = Counter[str](), list[float]()
        for report in (it for it in events if it["$report_type"] in ("CollectReport", "TestReport")):
            test = report["nodeid"]
            if report["outcome"] == "failed":
                failed.setdefault(test, _said(report))
            if report["$report_type"] == "CollectReport":
                continue
            if report["outcome"] == "skipped":
                skipped.add(test)
            if report["when"] == "teardown" or test in failed:
                ended.add(test)
            seconds[test] += report["duration"]
            times += [it for it in (report["start"], report["stop"]) if it]  # a crashed worker's has none
        span = max(times, default=0.0) - min(times, default=0.0)
        tests = Counter({test: seconds[test] for test in ended})
        cores = path.with_suffix(".cores")
        used = f", {cores.read_text().strip():>6} core seconds" if cores.exists() else ""
        return cls(name, exit_code, failed, len(skipped - failed.keys()), span, used, tests)

    @property
    def ended(self) -> bool:
        return self.exit_code in _ENDED and (self.exit_code == 1) == bool(self.failed)

    def __str__(self) -> str:
        how = f"pytest ended with exit code {self.exit_code}" if self.exit_code is not None else "it has not ended"
        return (
            f"{self.name:12} {len(self.tests):5} tests, {len(self.failed):3} failed, {self.skipped:3} skipped, "
            f"{self.span_s / 60:5.1f} min{self.used}{'' if self.ended else f'; {how}'}"
        )


def again(folder: Path, ids: list[str]) -> Block:
    """Runs tests one at a time. A test's limit is its own: its fixtures may have to make what others shared."""
    options = ("-m", "", "-o", "timeout_func_only=true", f"--report-log={folder}/alone.jsonl")
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    subprocess.run((sys.executable, "-m", "pytest", *options, *ids), env=env, check=False)
    return Block.read(folder, "alone")


def _named(failed: dict[str, str], how: str) -> None:
    for test, said in failed.items():
        print(f"{how}: {test}")
        print(textwrap.indent("\n".join(line[:200] for line in said.splitlines()), "    "))


def main(folder: Path, names: list[str], *, most_again: int) -> int:
    blocks = [Block.read(folder, name) for name in names]
    first = {test: said for block in blocks for test, said in block.failed.items()}
    green, passed_alone, failed = all(block.ended for block in blocks), dict[str, str](), first
    if 0 < len(first) <= most_again:
        print(f"\nonce more, one at a time: {', '.join(first)}", flush=True)
        alone = again(folder, [*first])
        if alone.exit_code in (0, 1):
            failed = alone.failed
            passed_alone = {test: said for test, said in first.items() if test not in failed}
        blocks.append(alone)
    green = green and not failed and any(block.tests for block in blocks)

    print(f"\nthe {_SLOWEST} slowest tests, with their fixtures:")
    for test, seconds in sum((block.tests for block in blocks), Counter[str]()).most_common(_SLOWEST):
        print(f"{seconds:7.1f} s  {test}")
    load, free = " ".join(f"{it:.1f}" for it in os.getloadavg()), shutil.disk_usage(folder).free >> 30
    print(f"load {load}; {free} GB of disk free\n", *blocks, "", sep="\n")
    _named(passed_alone, "passed only alone")
    _named(failed, "FAILED")
    if not any(block.tests for block in blocks):
        print("no test was selected")
    own = blocks[: len(names)]
    tests, skipped = sum(len(block.tests) for block in own), sum(block.skipped for block in own)
    print(f"tests: {'green' if green else 'RED'}")
    print(f"{tests - skipped - len(failed)} passed, {len(failed)} failed, {skipped} skipped")
    return 0 if green else 1


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--so-far"]
    sys.exit(main(Path(words[0]), words[1:], most_again=MOST_AGAIN if words == sys.argv[1:] else 0))
