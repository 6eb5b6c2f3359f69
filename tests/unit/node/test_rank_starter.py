"""The starter of ``tridock train``, with ranks that only do what their argument says."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.node.conftest import wait_until

RANK = """\
import json, os, signal, sys, time

number = os.environ["RANK"]
order = sys.argv[1 + int(os.environ["LOCAL_RANK"])]
if order == "environment":
    open(f"answer-{number}", "w").write(json.dumps([sys.argv[3:], dict(os.environ)]))
elif order.startswith("exit"):
    sys.exit(int(order[4:]))
elif order.startswith("signal"):
    os.kill(os.getpid(), int(order[6:]))
else:
    if order == "obey":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    elif order == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"pid-{number}.part", "w").write(str(os.getpid()))
    os.rename(f"pid-{number}.part", f"pid-{number}")
    time.sleep(9999)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "rank.py").write_text(RANK)
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: str, options: tuple[str, ...] = (), **node: str) -> subprocess.Popen[str]:
        number = () if "--run" in options else ("--nproc-per-node", "2")
        argv = [sys.executable, "-m", "tridock.node", "start-ranks", *number, "--master-port", "20001"]
        argv += [*options, "--module", "rank", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}", "TRIDOCK_RUN_ID": "kept"} | node
        made.append(subprocess.Popen(argv, cwd=tmp_path, env=env, text=True, start_new_session=True, **pipes))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate(timeout=STEP_S)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr without pids."""
    out, err = process.communicate(timeout=STEP_S)
    return process.returncode, out, re.sub(r"pid \d+", "pid P", err)


def pids(folder: Path) -> list[int]:
    """The processes of both ranks, once they run."""
    files = [folder / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ranks_get_the_environment_of_their_place_and_their_arguments(start: Start, tmp_path: Path) -> None:
    options = ("--nnodes", "3", "--node-rank", "1", "--master-addr", "192.0.2.1")
    hostile = ("--node-rank", "-m", "--", "two words", "$(id)", "%h", "--n")
    assert ended(start("environment", "environment", *hostile, options=options)) == (0, "", "")
    found = [json.loads((tmp_path / f"answer-{rank}").read_text()) for rank in (2, 3)]
    assert [argv for argv, _ in found] == [list(hostile)] * 2
    common = {
        "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_SIZE": "3", "CROSS_RANK": "1",
        "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "20001", "CUDA_VISIBLE_DEVICES": "0,1", "TRIDOCK_RUN_ID": "kept",
    }  # fmt: skip
    for local, (_, env) in enumerate(found):
        expected = {**common, "RANK": str(2 + local), "LOCAL_RANK": str(local)}
        assert {name: env[name] for name in expected} == expected


def test_ranks_of_a_run_get_the_slots_that_its_plan_has(start: Start, tmp_path: Path) -> None:
    places = [("a", 0), ("b", 2), ("b", 5)]
    ranks = [{"rank": rank, "node": node, "slot": slot} for rank, (node, slot) in enumerate(places)]
    (tmp_path / "plan.json").write_text(json.dumps({"ranks": ranks}))
    options = ("--run", str(tmp_path))
    assert ended(start("environment", "environment", options=options, TRIDOCK_NODE="b")) == (0, "", "")
    for local in range(2):
        _, env = json.loads((tmp_path / f"answer-{1 + local}").read_text())
        expected = {
            "RANK": str(1 + local), "LOCAL_RANK": str(local), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "1", "CROSS_SIZE": "2", "CUDA_VISIBLE_DEVICES": "2,5",
        }  # fmt: skip
        assert {name: env[name] for name in expected} == expected
    refused = ended(start(options=options, TRIDOCK_NODE="c"))
    assert refused == (2, "", "TRIDOCK_NODE: is not a node of the run; got 'c'; the run has a, b\n")


@pytest.mark.parametrize(
    ("orders", "code", "says"),
    [
        (("exit3", "obey"), 3, "rank 0 (pid P) exited with code 3\n"),
        (("obey", "signal9"), 137, "rank 1 (pid P) was ended by SIGKILL\n"),
        (("exit0", "exit5"), 5, "rank 1 (pid P) exited with code 5\n"),
        (("exit2", "ignore"), 2, "rank 0 (pid P) exited with code 2\n"),
    ],
)
def test_one_rank_that_fails_ends_the_others(
    start: Start, tmp_path: Path, orders: tuple[str, ...], code: int, says: str
) -> None:
    assert ended(start(*orders, options=("--grace", "0.2"))) == (code, "", says)
    assert all(is_gone(int(file.read_text())) for file in tmp_path.glob("pid-?"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_signals_are_forwarded(start: Start, tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start("obey", "obey")
    pids(tmp_path)
    process.send_signal(number)
    assert ended(process)[:2] == (code, "")


def test_sigterm_waits_for_ranks_that_save(start: Start, tmp_path: Path) -> None:
    """Until one of them has ended."""
    process = start("ignore", "ignore", options=("--grace", "0.1"))
    first, _ = pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    os.kill(first, signal.SIGKILL)
    assert ended(process)[0] == 137


def test_no_rank_outlives_a_starter_that_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("ignore", "obey")
    ranks = pids(tmp_path)
    process.kill()
    wait_until(lambda: all(map(is_gone, ranks)))


def test_a_rank_that_has_failed_shows_its_wait_status(start: Start, tmp_path: Path) -> None:
    """Until the others have been ended: the node agent reads it from there."""
    process = start("obey", "ignore")
    first, _ = pids(tmp_path)
    os.kill(first, signal.SIGTERM)
    wait_until(lambda: is_gone(first))
    assert int(Path(f"/proc/{first}/stat").read_text().split()[-1]) == 85 << 8
    process.kill()
