"""How long a rank may be without progress, by phase, before it counts as hung. Pure.

A step's usual time is learnt from the run itself. Until then the limit of a first step holds: a limit that nothing is
known about yet must end no healthy run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tridock.contracts import heartbeat

STEPS: Final = 3
"""A rank counts as hung in a step or an evaluation only after this many of its longest steps."""
LEARNT_STEPS: Final = 2
"""Steps after the first one that a rank must have measured before its own limit holds."""
PROGRESS_BYTES: Final = 64 << 20
"""A rank that has read or written this many bytes while it starts or saves has made progress."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of one phase."""

    seconds: float | None
    """None: ``launch.hang_timeout`` alone."""
    learns: bool = False
    """Whether the phase is made of steps: ``seconds`` then holds until enough of them are known."""
    counts_bytes: bool = False
    """Whether bytes that any rank reads or writes are progress, for all ranks in this phase."""


FIRST_STEP: Final = Limit(1800.0)

LIMITS: Final[Mapping[str, Limit]] = MappingProxyType({
    heartbeat.START: Limit(1800.0, counts_bytes=True),
    heartbeat.FIRST_STEP: FIRST_STEP,
    heartbeat.TRAIN: Limit(FIRST_STEP.seconds, learns=True),
    heartbeat.EVAL: Limit(FIRST_STEP.seconds, learns=True),
    heartbeat.SAVE: Limit(1800.0, counts_bytes=True),
    heartbeat.END: Limit(120.0),
    heartbeat.OBSERVED: Limit(None),
})  # fmt: skip
"""By phase. A phase that is not listed has no limit: the rank ends by itself."""

_COLLECTIVE_MINUTES: Final = 7 * 24 * 60


def collective_minutes(hang_s: float) -> int:
    """Returns torch's own timeout of the collectives of a supervised run, which must judge no rank.

    A rank may wait in one for as long as another's limit allows, and that has no end while bytes are progress. So it
    is a week, unless ``launch.hang_timeout`` is longer.
    """
    return max(_COLLECTIVE_MINUTES, 2 * math.ceil(hang_s / 60))


def limit_s(
    phase: str, hang_s: float, *, steps: int = 0, longest_step_s: float = 0.0, planned_step_s: float | None = None
) -> float:
    """Returns the seconds without progress after which a rank counts as hung; infinite if ``hang_s`` is 0.

    ``hang_s`` is ``launch.hang_timeout``: no limit is shorter. ``steps``: how many steps after the first one the rank
    has measured; ``longest_step_s``: the longest of its last ones; ``planned_step_s``: the plan's estimate.
    """
    limit = LIMITS.get(phase)
    if not hang_s or limit is None:
        return math.inf
    if limit.seconds is None:
        return hang_s
    if limit.learns and steps >= LEARNT_STEPS:
        return learnt_s(hang_s, longest_step_s, planned_step_s)
    if limit.learns or limit is FIRST_STEP:
        return max(limit.seconds, learnt_s(hang_s, longest_step_s, planned_step_s))
    return max(hang_s, limit.seconds)


def learnt_s(hang_s: float, longest_step_s: float = 0.0, planned_step_s: float | None = None) -> float:
    """Returns the limit of steps and evaluations once enough steps are known."""
    return max(hang_s, STEPS * longest_step_s, STEPS * (planned_step_s or 0.0))


def described(hang_s: float, planned_step_s: float | None = None, *, observed: bool = False) -> str:
    """Returns the limits of a run's steps for people, before the run. ``observed``: of ranks without heartbeats."""
    if not hang_s:
        return "none: launch.hang_timeout is 0"
    if observed:
        return f"{hang_s:,.0f} s without output or processor time"
    first = limit_s(heartbeat.FIRST_STEP, hang_s, planned_step_s=planned_step_s)
    usual = learnt_s(hang_s, planned_step_s=planned_step_s)
    return f"{usual:,.0f} s or {STEPS} longest steps without progress; at first {first:,.0f} s"
