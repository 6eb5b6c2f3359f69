"""The end of `make test`: what failed runs once more, alone, and the last lines say how all of it went."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import STEP_S

ROOT = Path(__file__).parents[2]
TESTS = """
import pathlib, pytest, subprocess

def test_passes():
    pass

@pytest.mark.parametrize("what", ["a b[c]", "ü/::"])
def test_first_time(what):
    seen = pathlib.Path(f"seen-{len(what)}")
    first = not seen.exists()
    seen.touch()
    assert not first, "the first time"

def test_broken():
    assert 1 == 2

@pytest.mark.parametrize("number", range(11))
def test_many(number):
    raise RuntimeError(number)

def test_slow_command():
    raise subprocess.TimeoutExpired("make", 9, b"\\n".join(b"%d" % number for number in range(99)))

def test_unseen():
    __tracebackhide__ = True
    pytest.fail("hidden", pytrace=False)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    hooks = "from tests.conftest import pytest_runtest_makereport\nfrom tests.core_seconds import *\n"
    (tmp_path / "conftest.py").write_text(hooks)
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "records").mkdir()
    return tmp_path


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        (sys.executable, *arguments), cwd=project, env=env, capture_output=True, text=True, check=False
    )


def verdict(project: Path, selected: str, *blocks: str) -> tuple[int, list[str]]:
    options = ("-n", "2", "--report-log=records/unit.jsonl", "-k", selected)
    python(project, "-m", "pytest", *options)
    done = python(project, str(ROOT / "tools" / "test_verdict.py"), "records", "unit", *blocks)
    lines = done.stdout.splitlines()
    assert "the 10 slowest tests, with their fixtures:" in lines[-60:], done.stdout + done.stderr
    return done.returncode, lines[-60:]


def test_what_passes_alone_is_named_and_green(project: Path) -> None:
    code, lines = verdict(project, "passes or first_time")
    assert code == 0
    assert any(
        re.fullmatch(r"unit +3 tests,   2 failed,   0 skipped, +0.\d min, +\d+ core seconds", it) for it in lines
    )
    assert "passed only alone: test_x.py::test_first_time[a b[c]]" in lines
    assert lines.count("    AssertionError: the first time") == 2
    assert lines[-2:] == ["tests: green", "3 passed, 0 failed, 0 skipped"]


def test_what_fails_again_is_red(project: Path) -> None:
    code, lines = verdict(project, "passes or first_time or broken")
    assert code == 1
    at = lines.index("FAILED: test_x.py::test_broken")
    assert lines[at + 1 : at + 3] == ["    assert 1 == 2", f"    {project}/test_x.py:15"]
    assert "passed only alone: test_x.py::test_first_time[a b[c]]" in lines
    assert lines[-2:] == ["tests: RED", "3 passed, 1 failed, 0 skipped"]


def test_many_failures_are_no_accident(project: Path) -> None:
    code, lines = verdict(project, "many")
    assert code == 1
    assert not any(line.startswith(("once more", "passed only alone")) for line in lines)
    assert lines[-2:] == ["tests: RED", "0 passed, 11 failed, 0 skipped"]


def test_a_block_that_did_not_end_is_red(project: Path) -> None:
    code, lines = verdict(project, "passes", "distributed")
    assert code == 1
    assert "distributed      0 tests,   0 failed,   0 skipped,   0.0 min; it has not ended" in lines
    assert lines[-2:] == ["tests: RED", "1 passed, 0 failed, 0 skipped"]


def test_a_file_that_cannot_be_imported_is_red(project: Path) -> None:
    (project / "test_y.py").write_text("import no_such_module\n")
    code, lines = verdict(project, "passes")
    assert code == 1
    assert "FAILED: test_y.py" in lines
    assert lines[-2] == "tests: RED"


def test_a_command_that_timed_out_is_shown_with_what_it_printed(project: Path) -> None:
    code, lines = verdict(project, "slow_command")
    said = lines[lines.index("FAILED: test_x.py::test_slow_command") :]
    assert code == 1
    assert "timed out after" in said[1]
    assert "    …" in said
    assert [line for line in said if line.strip().isdecimal()][-6:] == [f"    {number}" for number in range(93, 99)]


def test_a_failure_with_a_hidden_traceback_is_shown(project: Path) -> None:
    code, lines = verdict(project, "unseen")
    assert code == 1
    assert lines[lines.index("FAILED: test_x.py::test_unseen") + 1] == "    Failed: hidden"


def test_no_test_is_not_green(project: Path) -> None:
    code, lines = verdict(project, "nothing_of_that_name")
    assert code == 1
    assert lines[-3] == "no test was selected"


WAITS = """
import time

def test_waits():
    time.sleep(9999)
"""


def test_of_tests_that_were_ended_it_says_how_far_they_came(project: Path) -> None:
    (project / "test_z.py").write_text(WAITS)
    log = project / "records" / "unit.jsonl"
    options = ("-m", "pytest", "-n", "1", f"--report-log={log}", "-k", "passes or broken or waits")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen((sys.executable, *options), cwd=project, env=env, stdout=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + STEP_S
        while not (log.exists() and "test_waits" in log.read_text()):  # the report of its set-up
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.terminate()
    done = python(project, str(ROOT / "tools" / "test_verdict.py"), "--so-far", "records", "unit", "other")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert any(re.match(r"unit +2 tests,   1 failed,   0 skipped, .* min; it has not ended", line) for line in lines)
    assert "other            0 tests,   0 failed,   0 skipped,   0.0 min; it has not ended" in lines
    assert "FAILED: test_x.py::test_broken" in lines
    assert lines[-2:] == ["tests: RED", "1 passed, 1 failed, 0 skipped"]
    assert not any(line.startswith("once more") for line in lines)
