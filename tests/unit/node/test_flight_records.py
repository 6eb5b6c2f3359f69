"""Dumps of flight recorders that hung ranks are asked for, of stand-ins that answer as torch does."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.node.conftest import wait_until
from tridock.contracts import heartbeat, run_folder
from tridock.node.agent.evidence import last_collectives
from tridock.node.agent.rank_status import RankMonitor

# As torch's monitor thread: the pipe is its own, and is read without waiting.
RANK = """
import faulthandler, os, pickle, sys, time
from pathlib import Path
from tridock.contracts import heartbeat
folder, rank, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
heartbeat.start(folder, rank)
stacks = heartbeat.stacks_path(folder, rank).open("w")
faulthandler.register(heartbeat.STACKS_SIGNAL, stacks, all_threads=True)
pipe = f"{folder / heartbeat.FLIGHT_PIPES}{rank}.pipe"
if kind != "none":
    os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if kind in ("dumps", "silent") else None
heartbeat.beat(heartbeat.TRAIN)
print(flush=True)
while True:
    time.sleep(0.05)
    if kind == "dumps" and os.read(reader, 128):
        entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 7 + rank, "state": "scheduled"}
        whole = pickle.dumps({"version": "2.10", "entries": [entry]})
        with open(folder / "logs" / f"flight-rank-{rank}", "wb", buffering=0) as file:
            file.write(whole[:20])
            time.sleep(0.5)
            file.write(whole[20:])
"""


def entry(number: int) -> bytes:
    return pickle.dumps({"entries": [{"process_group": ("0", ""), "collective_seq_id": number}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def begin(stack: ExitStack, folder: Path, *kinds: str) -> RankMonitor:
    """Starts ranks of these kinds; returns the monitor that watches them."""
    for rank, kind in enumerate(kinds):
        argv = [sys.executable, "-c", RANK, str(folder), str(rank), kind]
        process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
    return RankMonitor(folder, range(len(kinds)))


def test_ranks_that_hang_dump_what_they_have_recorded(folder: Path) -> None:
    """Not those whose pipe nobody reads, that have none, or that are another node's."""
    for rank in range(5):
        (folder / f"{run_folder.FLIGHT}{rank}").write_bytes(entry(99))  # of an attempt before
    with ExitStack() as stack:
        monitor = begin(stack, folder, "dumps", "dumps", "unread", "none")
        stacks = monitor.stacks(range(5))
        assert sorted(stacks) == [0, 1, 2, 3]
        assert last_collectives(folder) == {0: 7, 1: 8, 2: 99, 3: 99, 4: 99}


def test_a_recorder_that_does_not_answer_is_not_waited_for(folder: Path) -> None:
    with ExitStack() as stack:
        monitor = begin(stack, folder, "silent")
        for _ in range(3):
            assert sorted(monitor.stacks([0])) == [0]
        assert last_collectives(folder) == {}


def test_pipes_go_with_their_ranks(folder: Path) -> None:
    with ExitStack() as stack:
        monitor = begin(stack, folder, "unread")
    pipe = Path(f"{folder / heartbeat.FLIGHT_PIPES}0.pipe")
    wait_until(lambda: not monitor.read()[0].alive)
    assert pipe.is_fifo()
    monitor.reset()
    assert not pipe.exists()
    assert list((folder / "logs").iterdir()) == []
