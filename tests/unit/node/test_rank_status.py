"""What counts as progress of a rank with heartbeats, a real process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.node.conftest import wait_until
from tridock.contracts import heartbeat
from tridock.contracts.hang_limits import PROGRESS_BYTES
from tridock.node.agent.rank_status import RankMonitor, bytes_moved

RANK = """
import sys
from pathlib import Path
from tridock.contracts import heartbeat
heartbeat.start(Path(sys.argv[1]), 0)
heartbeat.beat(sys.argv[2])
part = bytes(1 << 20)
with open("/dev/null", "wb", buffering=0) as file:
    print(flush=True)
    for line in sys.stdin:
        for _ in range(int(line) // len(part)):
            file.write(part)
        print(flush=True)
"""


@contextmanager
def rank(folder: Path, phase: str) -> Iterator[subprocess.Popen[str]]:
    """A rank in this phase: for each number on its input it writes that many bytes, then answers."""
    argv = [sys.executable, "-c", RANK, str(folder), phase]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        answer(process)
        yield process
        assert process.stdin is not None
        process.stdin.close()


def answer(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"


def write(process: subprocess.Popen[str], size: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{size}\n")
    process.stdin.flush()
    answer(process)


@pytest.mark.parametrize(
    ("phase", "size", "is_progress"),
    [
        (heartbeat.START, PROGRESS_BYTES, True),
        (heartbeat.SAVE, PROGRESS_BYTES, True),
        (heartbeat.SAVE, PROGRESS_BYTES // 2, False),
        (heartbeat.TRAIN, PROGRESS_BYTES, False),
    ],
)
def test_bytes_are_progress_while_a_rank_starts_or_saves(
    tmp_path: Path, phase: str, size: int, is_progress: bool
) -> None:
    monitor = RankMonitor(tmp_path, (0,))
    with rank(tmp_path, phase) as process:
        wait_until(lambda: monitor.read()[0].age_s >= 1.0)
        write(process, size)
        (found,) = monitor.read()
        assert (found.age_s == 0.0) is is_progress
        assert found.phase == phase
        wait_until(lambda: monitor.read()[0].age_s >= 1.0)  # and none without more of them


def test_of_a_process_that_is_gone_no_bytes_are_known() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert bytes_moved(process.pid) is None
