"""Files of records longer than the memory that their readers take: they run beside the ranks."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.report.test_page import a_run
from tridock.contracts.events import Event, append_event, event_count, events_of
from tridock.contracts.records import read_lines, records_in
from tridock.node.agent.evidence import evidence
from tridock.node.agent.run_update import run_update
from tridock.trackers.subject import Subject
from tridock.train.rank.metrics import Metrics
from tridock.triage.first_failure import first_failure

BYTES = 64 << 20
ROOM = 24 << 20
LAST = 16_000


def fill(path: Path, piece: bytes) -> None:
    with path.open("ab") as file:
        for _ in range(BYTES // len(piece)):
            file.write(piece)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = a_run(tmp_path / "run", [], events=())
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(1, LAST + 1):
            file.write(json.dumps({"iteration": number, "loss": 2.0, "memory_bytes": [2**30]}) + " " * 4096 + "\n")
    samples = [{"prompt": "a", "text": "word " * 20_000}]
    fill(folder / "events.jsonl", json.dumps({"event": "samples", "iteration": 1, "samples": samples}).encode() + b"\n")
    append_event(folder, Event.RUN_FAILED, rank=0, node="a", reason="no")
    return folder


def rewind(folder: Path) -> None:
    Metrics(folder, active=True, tensorboard=False).rewind(LAST - 10)


READERS: dict[str, Callable[[Path], object]] = {
    "live page": lambda folder: run_update(folder, 0, 0, 0),
    "triage": evidence,
    "supervisor": lambda folder: (event_count(folder), events_of(folder, Event.RUN_FINISHED, 1)),
    "tracker": lambda folder: Subject(folder).summary(),
    "resume": rewind,
}


def peak(read: Callable[[Path], object], folder: Path) -> int:
    tracemalloc.start()
    try:
        read(folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reader", READERS)
def test_long_records_are_read_in_little_memory(run: Path, reader: str) -> None:
    assert peak(READERS[reader], run) < ROOM


@pytest.mark.parametrize("reader", READERS)
def test_so_is_a_line_without_end(run: Path, reader: str) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (run / name).write_bytes(b"")
        fill(run / name, b"x" * (1 << 20))
    assert peak(READERS[reader], run) < ROOM
    with (run / "events.jsonl").open("a") as file:
        file.write("\n")
    append_event(run, Event.RUN_FINISHED)
    assert [it["event"] for it in read_lines(run / "events.jsonl")] == ["run_finished"]


def test_what_they_say_is_whole(run: Path) -> None:
    update = run_update(run, 0, 0, 0)
    assert (update.records[0]["iteration"], update.records[-1]["iteration"]) == (1, LAST)
    assert update.events[-1]["event"] == "run_failed"
    assert ["samples" in it for it in update.events][-3:] == [False, True, False]
    assert update.event_count == event_count(run) > 600
    failure = first_failure({"": evidence(run).events}, {0: "a"})
    assert failure is not None
    assert str(failure) == "rank 0 on a first: no"
    rewind(run)
    assert [it["iteration"] for it in records_in(run / "metrics.jsonl")] == [*range(1, LAST - 9)]


def test_the_last_events_explain_a_run_that_has_too_many(run: Path) -> None:
    fill(run / "events.jsonl", json.dumps({"event": "evaluation", "text": "x" * 10_000}).encode() + b"\n")
    append_event(run, Event.RUN_FAILED, rank=1, node="b", reason="why")
    found = evidence(run).events
    assert len(found) <= 16 << 20
    assert found.endswith('"reason": "why"}\n')
    assert "samples" not in found
