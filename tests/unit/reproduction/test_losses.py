"""Losses of two runs, compared number by number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.reproduction.outcome import LossComparison, Point, compare_losses

Losses = dict[int, float | None]


def metrics(train: Losses, **splits: Losses):
    def records(losses: Losses) -> list[dict[str, object]]:
        return [{"iteration": iteration, "loss": loss} for iteration, loss in losses.items()]

    return records(train), {split: records(losses) for split, losses in splits.items()}


def test_the_same_to_the_last_bit() -> None:
    run = metrics({1: 7.0, 2: None, 3: 5.0}, valid={3: 6.0}, test={3: 6.5})
    assert compare_losses(run, run, 0.0) == LossComparison(5, 0, None, 0.0, None, 0)


def test_one_bit_is_a_difference_where_none_is_allowed() -> None:
    other = math.nextafter(5.0, 6.0)
    found = compare_losses(metrics({1: 7.0, 3: 5.0}), metrics({1: 7.0, 3: other}), 0.0)
    assert found == LossComparison(2, 1, Point(3, "train", 5.0, other), other - 5.0, 3, 0)
    assert compare_losses(metrics({1: 7.0, 3: 5.0}), metrics({1: 7.0, 3: other}), 1e-12).differing == 0


@pytest.mark.parametrize(
    ("then", "now", "agree"), [(100.0, 100.9, True), (100.0, 101.1, False), (0.5, 0.509, True), (0.5, 0.511, False)]
)
def test_a_tolerance_is_relative_to_losses_above_one(then: float, now: float, agree: bool) -> None:
    assert (compare_losses(metrics({1: then}), metrics({1: now}), 0.01).differing == 0) == agree


@pytest.mark.parametrize(("then", "now"), [(None, 1.0), (1.0, None)])
def test_a_loss_that_is_finite_in_one_run_only(then: float | None, now: float | None) -> None:
    found = compare_losses(metrics({1: then}), metrics({1: now}), 1e6)
    assert (found.differing, found.first) == (1, Point(1, "train", then, now))


def test_what_only_one_run_has_logged() -> None:
    then, now = metrics({1: 7.0, 2: 6.0}, valid={2: 6.5}), metrics({1: 7.0, 3: 5.0}, test={3: 5.5})
    assert compare_losses(then, now, 0.0) == LossComparison(3, 2, Point(2, "train", 6.0, None, False), 0.0, None, 2)


@given(losses=st.dictionaries(st.integers(1, 50), st.floats(0, 20) | st.none(), min_size=1), tolerance=st.floats(0, 1))
def test_a_run_agrees_with_itself_and_not_with_one_further_off(losses: Losses, tolerance: float) -> None:
    assert compare_losses(metrics(losses), metrics(losses), tolerance).differing == 0
    off = {it: None if loss is None else loss + 1.01 * (tolerance + 1e-6) * max(1, loss) for it, loss in losses.items()}
    found = compare_losses(metrics(losses), metrics(off), tolerance)
    assert found.differing == sum(loss is not None for loss in losses.values())
