"""The output of a rank that is any program: in its own log, and where it always goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.node.conftest import wait_until
from tridock.node.agent.observed_ranks import find_ranks

MODULE = [sys.executable, "-m", "tridock.node.rank_output"]
PROGRAM = "import os, sys; print(sys.argv[1:]); print('to stderr', file=sys.stderr); os._exit(3)"


def run_of(folder: Path) -> str:
    """Of each test its own: processes are found by it on the whole machine."""
    return f"output-test-{folder}"


def start(folder: Path, *arguments: str, rank: str = "7") -> subprocess.Popen[str]:
    env = {**os.environ, "TRIDOCK_RUN_FOLDER": str(folder), "TRIDOCK_RUN_ID": run_of(folder), "RANK": rank}
    return subprocess.Popen([*MODULE, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train.py", "a b"), ["a b"]),
        (("--local_rank=1", "train.py", "x"), ["--local_rank=1", "x"]),
        (("--local-rank=1", "-m", "train", "x"), ["--local-rank=1", "x"]),
        (("--program", sys.executable, "-u", "train.py", "-m"), ["-m"]),
    ],
)
def test_the_program_gets_its_arguments_and_the_log_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: list[str]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    process = start(tmp_path, *arguments)
    output = process.communicate(timeout=STEP_S)[0]
    assert (process.returncode, output) == (3, f"{expected}\nto stderr\n")
    assert (tmp_path / "logs" / "rank-7.log").read_text() == output


def test_a_signal_ends_the_program_itself(tmp_path: Path) -> None:
    process = start(tmp_path, "--program", "sh", "-c", "echo $$; kill -9 $$")
    assert process.communicate(timeout=STEP_S)[0] == f"{process.pid}\n"
    assert process.returncode == -9


def test_the_copy_is_no_part_of_the_rank(tmp_path: Path) -> None:
    process = start(tmp_path, "--program", "sh", "-c", "echo started; exec sleep 9999")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    wait_until(lambda: bool(find_ranks(run_of(tmp_path))))  # in the middle of its exec it has no environment
    ranks = find_ranks(run_of(tmp_path))
    process.kill()
    process.communicate(timeout=STEP_S)
    assert {rank: seen.pid for rank, seen in ranks.items()} == {7: process.pid}


def test_without_a_log_the_program_runs_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    output = start(tmp_path, "--program", "echo", "done").communicate(timeout=STEP_S)[0]
    assert output.splitlines()[-1] == "done"
    assert "cannot be written" in output
