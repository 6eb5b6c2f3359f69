"""Exit codes that mean something of Tridock's own: a user's program may end with them, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.lease import HeldLease
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.agent_connections import AgentConnections
from tridock.node.supervisor.attempt import Attempt, Observations
from tridock.node.supervisor.verdict import Verdict


def attempt_of(folder: Path, supervision: Supervision) -> Any:
    lease = HeldLease.first(folder, "a", 0.0)
    agents = AgentConnections(folder, supervision, lease)
    return Attempt(folder, supervision, lease, agents, Observations(folder, supervision))


@pytest.mark.parametrize(
    ("observed", "code", "becomes"), [(True, 85, 4), (True, 143, 4), (True, 3, 4), (False, 85, 85)]
)
def test_a_program_that_leaves_with_them_has_failed(tmp_path: Path, observed: bool, code: int, becomes: int) -> None:
    (tmp_path / "supervision.json").touch()
    supervision = Supervision("a", {"a": (0,)}, (), 20000, 30.0, observed=observed)
    attempt = attempt_of(tmp_path, supervision)
    end = Verdict(Cause.LAUNCHER_EXITED, f"ended with exit code {code}", code=code)
    assert attempt._as_failed(end).code == becomes


@pytest.mark.parametrize("asked", [True, False])
def test_ranks_that_saved_because_an_agent_ended_them_were_not_preempted(tmp_path: Path, asked: bool) -> None:
    """A head that was paused: the agent of another node sent SIGTERM, which the ranks take for a scheduler's."""
    (tmp_path / "supervision.json").touch()
    supervision = Supervision("a", {"a": (0,), "b": (1,)}, ("b",), 20000, 30.0)
    attempt = attempt_of(tmp_path, supervision)
    attempt._observations.preemption_requested = asked
    append_event(tmp_path, Event.HEAD_LOST, node="b", cause=Cause.HEAD_SILENT, reason="heard nothing from the head")
    assert attempt._ended_by_agents() is None
    append_event(tmp_path, Event.RUN_PREEMPTED, iteration=7)
    ended = attempt._ended_by_agents()
    assert (ended is None) if asked else (ended.cause, ended.node) == (Cause.HEAD_SILENT, "b")
