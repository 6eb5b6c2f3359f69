"""A node lost with its ranks: those of other nodes fail at once, and the node is to blame."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tridock.contracts.events import Cause
from tridock.contracts.lease import HeldLease
from tridock.contracts.rank_status import LinkFaults, RankStatus
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.attempt import Attempt, Observations
from tridock.node.supervisor.verdict import Verdict


class Agents:
    """Two nodes: ``a`` speaks on; ``b`` has been silent for long, or spoke after ``after_s``."""

    def __init__(self, after_s: float | None) -> None:
        self._began, self._after_s = time.monotonic(), after_s

    def silence_s(self) -> dict[str, float]:
        elapsed = time.monotonic() - self._began
        spoke = self._after_s is not None and elapsed > self._after_s
        return {"a": 0.0, "b": 0.01 if spoke else 1.0 + 100 * elapsed}

    def ssh_errors(self) -> dict[str, str]:
        return {}

    def have_reported_since(self, _moment: float) -> bool:
        return True

    def statuses(self) -> dict[str, list[RankStatus]]:
        return {}

    def memory_kills(self) -> dict[str, int]:
        return {}

    def link_faults(self) -> dict[str, tuple[LinkFaults, ...]]:
        return {}

    def clocks_s(self) -> dict[str, float]:
        return {}

    def is_stop_asked(self) -> bool:
        return False

    def poll(self, seconds: float) -> None:
        time.sleep(0.01)


def attempt_with(folder: Path, agents: Any) -> Any:
    supervision = Supervision("a", {"a": (0,), "b": (1,)}, (), 20000, 30.0, observed=True)
    return Attempt(folder, supervision, HeldLease.first(folder, "a", 0.0), agents, Observations(folder, supervision))


@pytest.mark.parametrize(("after_s", "cause"), [(None, Cause.NODE_SILENT), (0.0, None)])
def test_the_node_that_went_silent_is_to_blame(tmp_path: Path, after_s: float | None, cause: Cause | None) -> None:
    (tmp_path / "supervision.json").touch()
    attempt = attempt_with(tmp_path, Agents(after_s))
    verdict = attempt._lost_peer()
    assert (verdict and verdict.cause, verdict and verdict.node) == ((cause, "b") if cause else (None, None))


@pytest.mark.parametrize("asked_to_end", [True, False])
def test_a_rank_that_its_launcher_ended_may_have_lost_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_to_end: bool
) -> None:
    """As mpirun does at once, before the node is missed."""
    (tmp_path / "supervision.json").touch()
    (tmp_path / "logs").mkdir()
    attempt = attempt_with(tmp_path, Agents(None))
    ended = Verdict(Cause.RANK_SIGNALLED, "was ended by SIGTERM", "a", 0, asked_to_end=asked_to_end)
    monkeypatch.setattr(attempt, "_wait", lambda: ended)
    for name in ("_end_all", "_ended_by_agents"):
        monkeypatch.setattr(attempt, name, lambda: None)
    monkeypatch.setattr(attempt, "_wait_for_launcher", lambda _seconds: None)
    assert attempt.run()[1].node == ("b" if asked_to_end else "a")
