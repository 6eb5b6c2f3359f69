"""Ranks of a program that writes no heartbeats, as real processes."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts import heartbeat, run_folder
from tridock.node.agent import observed_ranks, rank_status
from tridock.node.agent.observed_ranks import ObservedRanks, find_ranks
from tridock.node.agent.rank_status import RankMonitor

Start = Callable[..., "subprocess.Popen[bytes]"]
KERNEL = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
KERNEL_KEEPS_THE_STATUS = pytest.mark.skipif(KERNEL < (6, 15), reason="Linux forgets the status of a reaped process")


@pytest.fixture
def run_id() -> str:
    return run_folder.new_run_id("observed")


@pytest.fixture
def start(run_id: str) -> Iterator[Start]:
    made: list[subprocess.Popen[bytes]] = []

    def start_one(script: str, **env: str) -> subprocess.Popen[bytes]:
        made.append(
            subprocess.Popen(
                ["sh", "-c", script],
                env={"PATH": os.environ["PATH"], "TRIDOCK_RUN_ID": run_id, **env},
                start_new_session=True,
            )
        )
        return made[-1]

    yield start_one
    for process in made:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + STEP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sleeps(run_id: str, rank: int) -> bool:
    """Whether the rank is a program at rest; in the middle of its exec it has no environment to be found by."""
    seen = find_ranks(run_id).get(rank)
    return seen is not None and Path(f"/proc/{seen.pid}/cmdline").read_bytes().startswith(b"sleep")


def test_the_outermost_process_of_each_rank(run_id: str, start: Start) -> None:
    first = start("sleep 9999 & wait", RANK="0")
    second = start("exec sleep 9999", OMPI_COMM_WORLD_RANK="7")
    start("exec sleep 9999")  # the launcher
    until(lambda: 0 in find_ranks(run_id) and sleeps(run_id, 7))
    found = find_ranks(run_id)
    assert (found[0].pid, found[7].pid) == (first.pid, second.pid)


def test_ranks_that_a_rank_starts_itself(tmp_path: Path, run_id: str, start: Start) -> None:
    """As `bash train.sh` with torchrun in it, started once per slot; and a worker of a rank's inference engine."""
    (tmp_path / "torchrun").write_text("#!/bin/sh\nRANK=0 WORLD_SIZE=1 sleep 9999 & wait\n")
    (tmp_path / "torchrun").chmod(0o755)
    start(f"{tmp_path}/torchrun & wait", RANK="1", WORLD_SIZE="2")
    start("RANK=0 WORLD_SIZE=1 sleep 9999 & wait", RANK="0", WORLD_SIZE="2")
    until(lambda: set(find_ranks(run_id)) == {0, 1} and find_ranks(run_id)[1].inner_world_size)
    found = find_ranks(run_id)
    assert [(found[rank].world_size, found[rank].inner_world_size) for rank in (0, 1)] == [(2, 0), (2, 1)]
    monitor = RankMonitor(tmp_path / run_id, (0, 1), observed=True)
    assert {it.rank: (it.world_size, it.inner_world_size) for it in monitor.read()} == {0: (2, 0), 1: (2, 1)}


def test_a_rank_is_active_while_it_computes_or_its_children_write(
    run_id: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_ranks, "_SEARCH_S", 0.0)
    start("exec sleep 9999", RANK="0")
    start("while :; do :; done", RANK="1")
    start("(while sleep 0.01; do echo x; done) >/dev/null & wait", RANK="2")
    until(lambda: sleeps(run_id, 0) and set(find_ranks(run_id)) == {0, 1, 2})
    ranks = ObservedRanks(run_id)
    until(lambda: {rank for rank, beat in ranks.read().items() if beat.count > 3} == {1, 2})
    idle = ranks.read()[0]
    assert (idle.phase, idle.count) == (heartbeat.OBSERVED, 0)


@pytest.mark.parametrize(
    ("script", "phase", "wait_status"),
    [("exit 0", "end", 0), ("exit 3", "observed", 3 << 8), ("kill -9 $$", "observed", 9)],
)
@pytest.mark.parametrize("reaped", [False, pytest.param(True, marks=KERNEL_KEEPS_THE_STATUS)])
def test_how_a_rank_ended(
    tmp_path: Path, run_id: str, start: Start, script: str, phase: str, wait_status: int, reaped: bool
) -> None:
    go = tmp_path / "go"
    process = start(f"while ! [ -e {go} ]; do sleep 0.01; done; {script}", RANK="4")
    monitor = RankMonitor(tmp_path / run_id, (4, 5), observed=True)
    until(lambda: [status.rank for status in monitor.read()] == [4])
    go.touch()
    if reaped:
        process.wait()
    until(lambda: reaped or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
    (status,) = monitor.read()
    assert (status.phase, status.alive, status.wait_status) == (phase, False, wait_status)


def test_a_rank_whose_end_nobody_saw_is_gone(
    tmp_path: Path, run_id: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_status, "reaped_status", lambda _: None)  # as on a kernel before 6.15
    process = start("exec sleep 9999", RANK="0")
    monitor = RankMonitor(tmp_path / run_id, (0,), observed=True)
    until(monitor.read)
    process.kill()
    process.wait()
    (status,) = monitor.read()
    assert (status.phase, status.alive, status.wait_status) == (heartbeat.GONE, False, None)


def test_a_program_may_write_heartbeats(tmp_path: Path, run_id: str) -> None:
    code = "from tridock import heartbeat; heartbeat.beat(3); heartbeat.beat(4)"
    env = {**os.environ, "TRIDOCK_RUN_FOLDER": str(tmp_path), "RANK": "2"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    beat = heartbeat.read(tmp_path, 2)
    assert beat is not None
    assert (beat.phase, beat.iteration) == (heartbeat.TRAIN, 4)
    outside = {name: value for name, value in env.items() if name != "TRIDOCK_RUN_FOLDER"}
    subprocess.run([sys.executable, "-c", code], env=outside, check=True)


# ---- stacks of programs, by py-spy -----------------------------------------------------------------------------------

PROGRAM = """
import os, threading, time
if os.environ["RANK"] == "1":
    os.fork()
    threading.Thread(target=threading.Event().wait, name="prefetcher").start()
def waits_for_a_friend():
    time.sleep(9999)
waits_for_a_friend()
"""


def log_of(folder: Path, rank: int) -> str:
    path = folder / run_folder.rank_log(rank)
    return path.read_text() if path.exists() else ""


def test_the_stacks_of_any_python_program(tmp_path: Path, run_id: str, start: Start) -> None:
    """Below a shell (0), of a rank with a data loader's worker (1); of what is no Python the reason (2)."""
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = tmp_path / run_id
    (folder / "logs").mkdir(parents=True)
    program = f"{sys.executable} {tmp_path}/program.py"
    start(f"{program} & wait", RANK="0")
    start(f"exec {program}", RANK="1")
    start("exec sleep 9999", RANK="2")
    monitor = RankMonitor(folder, (0, 1, 2), observed=True)
    places = tuple(f"{tmp_path}/program.py:{place}" for place in ("7 in waits_for_a_friend", "8 in <module>"))
    until(lambda: monitor.stacks([0, 1]) == {0: places, 1: places})
    assert "Thread prefetcher (most recent call first):\n  File " in log_of(folder, 1)
    until(lambda: sleeps(run_id, 2))
    until(lambda: monitor.stacks([2]) == {} and "its threads:\nnone: py-spy cannot read process" in log_of(folder, 2))


def test_stacks_that_py_spy_may_not_or_cannot_take(
    tmp_path: Path, run_id: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / run_id
    (folder / "logs").mkdir(parents=True)
    start("exec sleep 9999", RANK="0")
    until(lambda: sleeps(run_id, 0))
    for name, script in (
        ("slow", "exec sleep 9999"),
        ("refused", "echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1"),
    ):
        program = tmp_path / name / "py-spy"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
        assert RankMonitor(folder, (0,), observed=True).stacks([0]) == {}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert RankMonitor(folder, (0,), observed=True).stacks([0]) == {}
    log = log_of(folder, 0)
    assert re.search(r"none: py-spy has not read process \d+ within 4 s\n", log)
    assert re.search(r"none: py-spy cannot read process \d+: Permission Denied\n", log)
    assert "none: py-spy is not in the image; install it there (pip install py-spy)\n" in log


@pytest.mark.parametrize(
    ("printed", "got"),
    [
        ("", "nothing"),
        ("py-spy 9: no such option", "'py-spy 9: no such option'"),
        ("{}", "'{}'"),
        ("null", "'null'"),
        ("[]", "'[]'"),
        ("[1]", "'[1]'"),
        ('[{"pid": 1, "thread_name": null}]', """'[{"pid": 1, "thread_name": null}]'"""),
        ('[{"pid": 1, "os_thread_id": 1, "thread_name": "a", "frames": [7]}]', "'[{"),
        ("[" * 9999, f"'{'[' * 200}'\n"),
    ],
)
def test_stacks_that_py_spy_prints_in_another_form(
    tmp_path: Path, run_id: str, start: Start, monkeypatch: pytest.MonkeyPatch, printed: str, got: str
) -> None:
    folder = tmp_path / run_id
    (folder / "logs").mkdir(parents=True)
    start("exec sleep 9999", RANK="0")
    until(lambda: sleeps(run_id, 0))
    (tmp_path / "printed").write_text(printed)
    (tmp_path / "py-spy").write_text(f"#!/bin/sh\nexec cat {tmp_path}/printed\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert RankMonitor(folder, (0,), observed=True).stacks([0]) == {}
    reason = r"none: py-spy has not printed the threads of process \d+ in the JSON of py-spy 0\.4; got "
    assert re.search(rf"its threads:\n{reason}{re.escape(got)}", log_of(folder, 0))
