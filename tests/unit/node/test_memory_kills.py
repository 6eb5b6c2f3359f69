"""Processes that the kernel killed for memory: counted in the container's cgroup, and part of every verdict."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tridock.contracts import process_records, run_folder
from tridock.contracts.events import Cause, Event, events_of
from tridock.contracts.lease import HeldLease
from tridock.contracts.process_records import ProcessRecord
from tridock.contracts.rank_status import LinkFaults
from tridock.contracts.supervision import Supervision
from tridock.node.agent import rank_status
from tridock.node.agent.memory_kills import memory_kills
from tridock.node.agent.rank_status import RankMonitor
from tridock.node.supervisor.attempt import Attempt, Observations
from tridock.node.supervisor.verdict import Verdict
from tridock.triage.first_failure import evidence_beside

V2 = "low 0\nhigh 0\nmax 9\noom 2\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize("text", [V2, V1])
def test_the_counter_of_either_version(tmp_path: Path, text: str) -> None:
    (tmp_path / "counter").write_text(text.format(3))
    assert memory_kills((tmp_path / "none", tmp_path / "counter")) == 3


def test_without_a_counter_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert memory_kills((tmp_path / "none", tmp_path / "empty")) == 0


def test_kills_count_from_the_attempts_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "memory.events"
    monkeypatch.setattr(rank_status, "memory_kills", lambda: memory_kills((counter,)))
    counter.write_text(V2.format(1))
    monitor = RankMonitor(tmp_path, (0,), observed=True, node="here")
    assert monitor.memory_kills == 0
    counter.write_text(V2.format(2))
    assert monitor.memory_kills == 1
    monitor.reset()
    assert monitor.memory_kills == 0
    counter.write_text(V2.format(0))  # the container was started again
    assert monitor.memory_kills == 0


def test_a_kill_before_the_agents_start_counts_by_the_record_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_status, "memory_kills", lambda: 5)
    begun = ProcessRecord(0, 1, 1, process_records.this_container(), time.monotonic(), 4)
    process_records.write(tmp_path, "here", begun)
    monitor = RankMonitor(tmp_path, (0,), observed=True, node="here")
    monitor.read()
    assert monitor.memory_kills == 1


class Agents:
    """The agents of a node on which the kernel has killed a process, a link went down, and the clock is behind."""

    def memory_kills(self) -> dict[str, int]:
        return {"b": 1}

    def link_faults(self) -> dict[str, tuple[LinkFaults, ...]]:
        return {"b": (LinkFaults("eth0", 2),)}

    def clocks_s(self) -> dict[str, float]:
        return {"a": 0.0, "b": -7.25}


@pytest.mark.parametrize(
    ("cause", "beside"),
    [
        (Cause.RANK_EXITED, "; the kernel killed a process for memory on b"),
        (Cause.LAUNCHER_EXITED, "; the kernel killed a process for memory on b"),
        (Cause.RANK_KILLED_FOR_MEMORY, ""),
    ],
)
def test_every_verdict_tells_of_it(tmp_path: Path, cause: Cause, beside: str) -> None:
    (tmp_path / "supervision.json").touch()
    (tmp_path / "logs").mkdir()
    supervision = Supervision("a", {"a": (0,), "b": (1,)}, (), 20000, 30.0, observed=True)
    lease, agents, observations = HeldLease.first(tmp_path, "a", 0.0), Agents(), Observations(tmp_path, supervision)
    attempt: Any = Attempt(tmp_path, supervision, lease, agents, observations)
    verdict = attempt._record(Verdict(cause, "ended", "a", 0))
    assert verdict.reason == f"ended{beside}"
    assert (tmp_path / run_folder.LAUNCHER_LOG).read_text() == f"tridock: rank 0 on a ended{beside}\n"
    (event,) = events_of(tmp_path, Event.MEMORY_KILLS)
    assert (event["node"], event["processes"]) == ("b", 1)
    beside = evidence_beside({"a": (tmp_path / "events.jsonl").read_text()})
    assert beside == ("eth0 of b went down 2 times", "the clock of b is 7.2 s behind the head's")
