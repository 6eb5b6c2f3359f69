"""How long a rank may be without progress: never less than what its steps take, and never without a limit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.contracts import heartbeat
from tridock.contracts.hang_limits import LEARNT_STEPS, LIMITS, described, limit_s

phases = st.sampled_from(sorted(LIMITS))
limits = st.floats(1, 10_000)
times = st.floats(0, 10_000)
planned = st.none() | times
steps = st.integers(0, 99)


@given(phases, limits, steps, times, planned)
def test_no_limit_is_shorter_than_the_users(phase: str, hang_s: float, n: int, longest: float, plan: float) -> None:
    found = limit_s(phase, hang_s, steps=n, longest_step_s=longest, planned_step_s=plan)
    assert hang_s <= found < math.inf


@given(phases, steps, times, planned)
def test_zero_is_no_limit(phase: str, n: int, longest: float, plan: float | None) -> None:
    assert limit_s(phase, 0, steps=n, longest_step_s=longest, planned_step_s=plan) == math.inf


@given(st.sampled_from([heartbeat.TRAIN, heartbeat.EVAL]), limits, steps, times, planned)
def test_three_steps_are_no_hang(phase: str, hang_s: float, n: int, longest: float, plan: float | None) -> None:
    found = limit_s(phase, hang_s, steps=n, longest_step_s=longest, planned_step_s=plan)
    assert found >= 3 * longest
    assert found >= 3 * (plan or 0.0)


@given(st.sampled_from([heartbeat.FIRST_STEP, heartbeat.TRAIN, heartbeat.EVAL]), limits, times, planned)
def test_before_it_has_learnt_the_limit_is_that_of_a_first_step(
    phase: str, hang_s: float, longest: float, plan: float | None
) -> None:
    for n in range(LEARNT_STEPS):
        assert limit_s(phase, hang_s, steps=n, longest_step_s=longest, planned_step_s=plan) >= 1800.0


@given(limits, steps, times, times, planned)
def test_a_longer_step_makes_no_limit_shorter(hang_s: float, n: int, one: float, two: float, plan: float) -> None:
    least, most = sorted((one, two))
    short, long = (
        limit_s(heartbeat.TRAIN, hang_s, steps=n, longest_step_s=it, planned_step_s=plan) for it in (least, most)
    )
    assert short <= long


@pytest.mark.parametrize(
    ("n", "longest", "plan", "limit"),
    [
        (0, 0.0, None, 1800.0),  # the first step has ended, and nothing else is known
        (1, 35.0, None, 1800.0),
        (2, 35.0, None, 105.0),
        (2, 0.4, None, 30.0),
        (2, 131.0, None, 393.0),  # a first step that compiled
        (2, 0.4, 20.0, 60.0),
        (0, 700.0, None, 2100.0),
    ],
)
def test_examples(n: int, longest: float, plan: float | None, limit: float) -> None:
    assert limit_s(heartbeat.TRAIN, 30.0, steps=n, longest_step_s=longest, planned_step_s=plan) == limit


def test_other_phases() -> None:
    found = {phase: limit_s(phase, 30.0, steps=9, longest_step_s=50.0) for phase in LIMITS}
    assert found == {
        "start": 1800.0, "first_step": 1800.0, "train": 150.0, "eval": 150.0, "save": 1800.0, "end": 120.0,
        "observed": 30.0,
    }  # fmt: skip
    assert limit_s(heartbeat.SAVE, 7200.0) == 7200.0
    assert limit_s(heartbeat.LOST, 30.0) == math.inf


@pytest.mark.parametrize(
    ("hang_s", "plan", "text"),
    [
        (0, 12.0, "none: launch.hang_timeout is 0"),
        (30, None, "30 s or 3 longest steps without progress; at first 1,800 s"),
        (30, 800.0, "2,400 s or 3 longest steps without progress; at first 2,400 s"),
    ],
)
def test_what_a_plan_says(hang_s: int, plan: float | None, text: str) -> None:
    assert described(hang_s, plan) == text


def test_what_is_said_of_a_program_without_heartbeats() -> None:
    assert described(1800.0, observed=True) == "1,800 s without output or processor time"
    assert described(0.0, observed=True) == "none: launch.hang_timeout is 0"
