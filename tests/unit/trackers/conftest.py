"""Runs with trackers, and the Python that has the trackers' libraries (make trackers)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.report.test_page import a_run
from tridock.contracts.supervision import Supervision
from tridock.contracts.trackers import Notification, Tracker, find_python

ROOT = Path(__file__).parents[3]
RUN_ID = "demo-20261123-195500-abcd"


@pytest.fixture(scope="session")
def python() -> str:
    if (found := find_python("wandb")) is None:
        pytest.skip("the libraries of the trackers are not here (make trackers)")
    return found


def make_run(folder: Path, *trackers: Tracker, losses: int = 30, notify: tuple[Notification, ...] = ()) -> Path:
    """A run whose folder says that it is running, until :func:`end`."""
    run = a_run(folder / RUN_ID, [5.0 - number / 10 for number in range(losses)], events=())
    (run / "logs").mkdir()
    supervision = Supervision("localhost", {"localhost": (0,)}, (), 20000, 30.0, trackers=trackers, notify=notify)
    (run / "supervision.json").write_text(supervision.to_json())
    return run


def end(run: Path, code: int = 0) -> None:
    (run / "exit_code").write_text(f"{code}\n")


@pytest.fixture
def start(python: str) -> Callable[..., subprocess.Popen[str]]:
    def begin(*argv: str | Path, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [python, "-P", "-m", "tridock.trackers", *map(str, argv)],
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT), **env},
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin
