"""A suite ends what suites that were killed have left running, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import killed_suites
from tests.patience import STEP_S

ROOT = Path(__file__).parents[2]
SUITE = """
import subprocess, time
from tests import killed_suites

killed_suites.mark()
print(subprocess.Popen(["sleep", "9999"], start_new_session=True, stdout=2).pid, flush=True)
time.sleep(9999)
"""


def test_what_a_killed_suite_left_is_ended_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(killed_suites.NAME, raising=False)
    argv = (sys.executable, "-c", SUITE)
    suites = [subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    left, kept = [int(suite.stdout.readline()) for suite in suites if suite.stdout]
    try:
        suites[0].kill()
        suites[0].wait()
        assert left in killed_suites.end_theirs()
        deadline = time.monotonic() + STEP_S
        while _runs(left):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert kept not in killed_suites.end_theirs()
        assert suites[1].poll() is None
    finally:
        for suite in suites:
            suite.kill()
            suite.communicate(timeout=STEP_S)
        assert kept in killed_suites.end_theirs()


def _runs(pid: int) -> bool:
    """A zombie has ended, and only nobody has asked for its exit code."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_name_whose_suite_has_ended_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(killed_suites.NAME, f"{os.getpid()} 1")
    killed_suites.mark()
    own = os.environ[killed_suites.NAME]
    assert own.startswith(f"{os.getpid()} ")
    assert own != f"{os.getpid()} 1"
    killed_suites.mark()
    assert os.environ[killed_suites.NAME] == own
