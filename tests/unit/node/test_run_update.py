"""What a node answers to those who watch a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.unit.report.test_page import a_run
from tridock.contracts.events import Event, append_event
from tridock.contracts.run_state import RunState
from tridock.node.agent.run_update import run_update


def line(iteration: int, loss: float | None, **more: object) -> str:
    return json.dumps({"iteration": iteration, "loss": loss, **more}) + "\n"


def test_only_what_is_new_comes_with_the_next_answer(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [3.0, 2.0])
    first = run_update(run, 0, 0, 0)
    assert (first.replaces_earlier, [it["iteration"] for it in first.records]) == (True, [1, 2, 2])
    assert (first.event_count, first.plan["stages"][0]["stage"]) == (6, 0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(3, 1.5) + '{"iteration": 4, "lo')
    append_event(run, Event.RUN_RESTARTED, attempt=2)
    second = run_update(run, first.offset, first.inode, first.event_count)
    assert (second.replaces_earlier, [it["iteration"] for it in second.records]) == (False, [3])
    assert ([it["event"] for it in second.events], second.plan) == (["run_restarted"], {})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.0}\n')
    third = run_update(run, second.offset, second.inode, second.event_count)
    assert [it["iteration"] for it in third.records] == [4]


def test_a_run_that_went_back_replaces_its_records(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [3.0, 2.0, 1.0])
    first = run_update(run, 0, 0, 0)
    (run / "other").write_text(line(1, 3.0) + line(2, 2.5, longer=" " * first.offset))
    (run / "other").replace(run / "metrics.jsonl")
    again = run_update(run, first.offset, first.inode, first.event_count)
    assert (again.replaces_earlier, [it["loss"] for it in again.records]) == (True, [3.0, 2.5])


def test_a_long_run_is_thinned_and_keeps_its_extremes_ends_and_evaluations(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [])
    with (run / "metrics.jsonl").open("w") as file:
        for number in range(1, 100_001):
            loss = 99.0 if number == 54_321 else None if number == 77_777 else 2.0 + math.sin(number / 1000)
            file.write(line(number, loss))
            if number % 50_000 == 0:
                file.write(line(number, 2.5, split="valid"))
    update = run_update(run, 0, 0, 0)
    training = {it["iteration"]: it["loss"] for it in update.records if "split" not in it}
    assert len(update.records) < 3100
    assert {1, 54_321, 77_777, 100_000} <= set(training)
    assert training[54_321] == 99.0
    assert [it["iteration"] for it in update.records if "split" in it] == [50_000, 100_000]
    assert list(training) == sorted(training)


def test_the_ranks_are_those_that_the_supervisor_sees(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [1.0])
    assert run_update(run, 0, 0, 0).ranks == ()
    (run / ".ranks.json").write_text('[[0, "save", 9, 0.5, null], [1, "train", 8, 1.5, 30.0]]')
    ranks = run_update(run, 0, 0, 0).ranks
    assert [(it.rank, it.phase, it.iteration) for it in ranks] == [(0, "save", 9), (1, "train", 8)]
    assert [it.limit_s for it in ranks] == [None, 30.0]
    assert 1.5 <= ranks[1].age_s < 30


def test_a_run_without_records_has_a_state(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [], events=())
    (run / "metrics.jsonl").unlink()
    (run / "exit_code").write_text("85\n")
    update = run_update(run, 0, 0, 0)
    assert (update.state, update.exit_code, update.records, update.age_s) == (RunState.PREEMPTED, 85, (), None)
