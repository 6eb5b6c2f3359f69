"""Decides whether and how a failed run restarts: how often, from which checkpoint, under which conditions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tridock.contracts.checkpoints import newest
from tridock.contracts.events import Cause, Event, events_of
from tridock.contracts.supervision import Supervision
from tridock.errors import RequestError
from tridock.node.supervisor.verdict import Verdict


@dataclass(frozen=True, slots=True)
class RestartAttempt:
    """One restart: its time (seconds), the furthest iteration before it, and the furthest since."""

    at: float
    before: int
    reached: int = 0

    @property
    def helped(self) -> bool:
        """Whether the run advanced further than ever before."""
        return self.reached > self.before


def previous_attempts(folder: Path, now: float) -> list[RestartAttempt]:
    """Returns a run's restarts by an earlier supervisor, from its events; ``now`` is this process's clock.

    A restart's progress is the checkpoint from which the next one began.
    """
    events = events_of(folder, Event.RUN_RESTARTED)
    ages = [time.time() - datetime.fromisoformat(event["time"]).timestamp() for event in events]
    reached = [event["iteration"] for event in events]
    following = [*reached[1:], *reached[-1:]]
    return [RestartAttempt(now - age, *iterations) for age, *iterations in zip(ages, reached, following, strict=True)]


def refusal(supervision: Supervision, attempts: Sequence[RestartAttempt], now: float) -> str | None:
    """Returns why the run may not be restarted again, or None if it may.

    A restart without progress never leaves the window: an immediate failure would repeat.
    """
    window = supervision.restart_window_s
    counted = [one for one in attempts if not one.helped or window is None or now - one.at < window]
    if len(counted) < supervision.max_restarts:
        return None
    return f"restarted {len(attempts)} times, and restart.max is {supervision.max_restarts}"


def cannot_help(verdict: Verdict, folder: Path, events_before: int) -> str | None:
    """Returns why a restart would fail in the same way, or None if it may succeed."""
    if verdict.cause is Cause.DEVICES_TAKEN:
        return "another run uses its devices"
    if verdict.code == RequestError.exit_code:
        return "the request is wrong"
    if events_of(folder, Event.RUN_FINISHED):
        return "the training had come to its end"
    if any(event.get("agreed") for event in events_of(folder, Event.RUN_FAILED, events_before)):
        return "every rank found the same"
    return None


def checkpoint_iteration(folder: Path, supervision: Supervision, since: float) -> int | None:
    """Returns the iteration of the newest checkpoint that this run has written, or None.

    In a checkpoint folder shared by several runs, those from before ``since`` (a file time) belong to another run.
    Below the run's own ``folder`` all count, regardless of time, as clocks jump.
    """
    if supervision.checkpoints is None:
        return None
    checkpoints = Path(supervision.checkpoints)
    found = newest(checkpoints, 0.0 if checkpoints.is_relative_to(folder) else since)
    return None if found is None else found[0]
