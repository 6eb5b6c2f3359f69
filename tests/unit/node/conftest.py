"""Runs of one shell script each, in a workspace of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STEP_S
from tridock.contracts import run_folder
from tridock.contracts.supervision import Supervision
from tridock.node.agent.processes import stop_processes

FINISHED = """echo '{"event": "run_finished"}' >>"$FOLDER/events.jsonl"\n"""


def node(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m tridock.node …``, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tridock.node", *arguments], capture_output=True, text=True, timeout=STEP_S, check=False
    )


def answer(*arguments: str) -> Any:
    """What a verb that must succeed prints as JSON."""
    done = node(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls; fails the test where the condition does not come true."""
    deadline = time.monotonic() + STEP_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "work space"


@pytest.fixture
def make_run(workspace: Path) -> Iterator[Callable[..., Path]]:
    """Makes a run's folder around a script; what is left of its processes goes when the test ends."""
    made: list[Path] = []

    def make(script: str, name: str = "test") -> Path:
        folder = workspace / "runs" / run_folder.new_run_id(name)
        folder.mkdir(parents=True)
        text = f"set -eu\nFOLDER='{folder}'\n{script}"
        (folder / run_folder.LAUNCH_SCRIPT).write_text(text)
        alone = Supervision("here", {"here": ()}, (), master_port=1 + len(made), hang_timeout_s=STEP_S)
        (folder / run_folder.SUPERVISION).write_text(alone.to_json())
        made.append(folder)
        return folder

    yield make
    for folder in made:
        stop_processes(folder.name, grace_s=0.0)
