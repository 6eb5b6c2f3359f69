"""Tables of runs, as a user reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from tridock.contracts.node_answers import RunInfo
from tridock.contracts.run_state import RunState
from tridock.report.run_tables import _time, history_table, status_table

RUN = RunInfo(
    run_id="tiny-20260102-030405-abcd", state=RunState.RUNNING, exit_code=None, created="20260102-030405",
    experiment="tiny", nodes=("a", "b"), train_iters=400, duration_s=65.0, age_s=3.4,
    metrics={"iteration": 12, "loss": 2.34567, "tokens_per_second": 12345.6},
)  # fmt: skip
OF_IMAGES = replace(RUN, metrics={"iteration": 12, "loss": 2.34567, "samples_per_second": 56.4})
NEW = replace(RUN, run_id="new", nodes=(), metrics=None, age_s=None, duration_s=None, train_iters=None)
DIVERGED = replace(RUN, state=RunState.FAILED, exit_code=4, age_s=7860, metrics={"iteration": 3, "loss": None})


def cells(table: Table) -> list[list[str]]:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines() if "│" in line]


def test_status() -> None:
    assert cells(status_table([RUN, OF_IMAGES, NEW, DIVERGED, replace(RUN, metrics=None)])) == [
        [RUN.run_id, "2", "running", "12/400", "2.3457", "12,346 tokens/s", "3 s ago"],
        [RUN.run_id, "2", "running", "12/400", "2.3457", "56 samples/s", "3 s ago"],
        ["new", "", "running", "", "", "", ""],
        [RUN.run_id, "2", "failed", "3/400", "", "", "2 h ago"],
        [RUN.run_id, "2", "running", "0/400", "", "", ""],
    ]


def test_history() -> None:
    mine = replace(RUN, head="gpu-1", started_by="ada@desk", disk_bytes=3 << 29)
    assert cells(history_table([mine, NEW, DIVERGED], {"new": "job 17"})) == [
        [RUN.run_id, "gpu-1", "ada@desk", "running", "", "1 min 5 s", "2.3457", "1.50 GiB"],
        ["new", "job 17", "", "running", "", "", "", ""],
        [RUN.run_id, "this machine", "", "failed", "4", "1 min 5 s", "", ""],
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (3600, "1 h 0 min"), (7260, "2 h 1 min"), (90000, "1 d 1 h"), (86400, "1 d 0 h")],
)
def test_times(seconds: float, text: str) -> None:
    assert _time(seconds) == text
