"""`tridock bench` for real, on CPU ranks: a cell that runs, beside bare PyTorch, one refused and one that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.ranks import (
    check_communication,
    losses,
    make_data,
    make_run,
    rank_environment,
    read_lines,
)
from tests.patience import WORK_S
from tridock.contracts.node_answers import Process
from tridock.node.agent.processes import find_processes, stop_processes

pytestmark = pytest.mark.distributed

MATRIX = """
experiment: runs/base/experiment.yaml
axes:
  case:
    ddp: {parallel.strategy: ddp}
    tp3: {parallel.strategy: ddp, parallel.tensor_model_parallel_size: 3}
    no-data: {parallel.strategy: ddp, data.data_path: data/none}
world: [2]
iterations: 4
warmup: 2
repeats: 2
profiled: 2
"""


@pytest.mark.full
def test_a_matrix(tmp_path: Path) -> None:
    make_data(tmp_path)
    make_run(tmp_path, "base", 2)
    (tmp_path / "b.yaml").write_text(MATRIX)
    arguments = [sys.executable, "-m", "tridock.cli", "bench", "b.yaml", "-o", "out"]
    done = subprocess.run(arguments, cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, check=True)
    assert "2 of 3: tp3 · 2 ranks\n  refused: " in done.stdout
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert [cell["state"] for cell in cells] == ["ok", "refused", "failed"]
    ran, refused, failed = cells
    assert len(ran["step_s"]) == len(ran["runs"]) == 2
    # Two runs of two turns, the warm-up's apart; and the losses are those of a run alone.
    assert len(ran["over_bare"]) == 4
    beside = [path.parent for path in tmp_path.glob("runs/*/events.jsonl") if "beside_bare" in path.read_text()]
    assert len(beside) == 2
    assert all(losses(folder) == losses(tmp_path / "runs" / ran["runs"][0]) for folder in beside)
    assert ran["tokens_per_step"] == 8 * 16
    assert ran["tokens_per_second"] == pytest.approx(128 / ran["median_s"])
    assert ran["peak_bytes"] > ran["predicted_bytes"] > 0
    assert ran["device"] == "cpu"
    assert "parallel.tensor_model_parallel_size: must divide num_attention_heads 2" in refused["reason"]
    assert "data.data_path: is not on this machine" in failed["reason"]
    (end,) = [it for it in read_lines(tmp_path / "runs" / ran["runs"][0] / "events.jsonl") if "device" in it]
    assert len(end["peak_memory_by_rank"]) == 2
    assert end["peak_memory_bytes"] == max(end["peak_memory_by_rank"]) > 2**26
    folder = tmp_path / "runs" / ran["profiled_run"]
    check_communication(folder)
    measured = [event for event in read_lines(folder / "events.jsonl") if event["event"] == "communication_measured"]
    assert ran["communication"] == measured[0]["exposed"]


ENDLESS = """
experiment: runs/base/experiment.yaml
world: [2]
iterations: 1000000
timeout: {timeout}
"""


def start(workspace: Path, timeout: int, begun: Callable[[Path], object]) -> subprocess.Popen[str]:
    """A benchmark whose only run does not end of itself; the function returns when that has begun."""
    make_data(workspace)
    make_run(workspace, "base", 2)
    (workspace / "b.yaml").write_text(ENDLESS.format(timeout=timeout))
    arguments = [sys.executable, "-m", "tridock.cli", "bench", "b.yaml", "-o", "out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(arguments, cwd=workspace, env=rank_environment(), text=True, **pipes)  # type: ignore[call-overload]
    deadline = time.monotonic() + WORK_S
    while not begun(workspace):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    return process


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """What a failed test leaves would train for ever."""
    yield
    for folder in tmp_path.glob("runs/small-*"):
        stop_processes(folder.name, grace_s=0.0)


def trains(workspace: Path) -> bool:
    return any(workspace.glob("runs/*/metrics.jsonl"))


def left_behind(workspace: Path) -> list[Process]:
    return [found for folder in workspace.glob("runs/small-*") for found in find_processes(folder.name)]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_benchmark_that_is_told_to_end_stops_its_run(tmp_path: Path, number: int) -> None:
    with start(tmp_path, 600, trains) as process:
        assert left_behind(tmp_path)
        process.send_signal(number)
        output, _ = process.communicate(timeout=WORK_S)
    assert process.returncode == 130, output
    assert output == "1 of 1: 2 ranks\nstopped, together with the current run; nothing was measured\n"
    assert left_behind(tmp_path) == []


@pytest.mark.full  # the one above stops it too
def test_a_run_that_is_given_up_is_stopped(tmp_path: Path) -> None:
    with start(tmp_path, 30, left_behind) as process:
        for found in left_behind(tmp_path):
            with suppress(ProcessLookupError):  # one of a start that has ended since
                os.setpriority(os.PRIO_PROCESS, found.pid, 19)  # it trains till then, beside other tests
        output, _ = process.communicate(timeout=WORK_S)
    assert "failed: no end after 30 s" in output
    assert process.returncode == 4
    assert left_behind(tmp_path) == []
