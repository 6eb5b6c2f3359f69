"""The learning rate against the formula, point by point."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.experiment.schema import Optimizer
from tridock.experiment.training import learning_rate


def rates(train_iters: int, **fields: object) -> list[float]:
    optimizer = Optimizer.model_validate({"lr": 1.0, "min_lr": 0.1} | fields)
    return [learning_rate(iteration, optimizer, train_iters) for iteration in range(1, train_iters + 1)]


def test_linear_with_warmup() -> None:
    found = rates(8, lr_decay_style="linear", lr_warmup_iters=4, lr_decay_iters=7)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.7, 0.4, 0.1, 0.1])


def test_cosine() -> None:
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * n / 5)) for n in range(1, 5)]
    assert rates(5, lr_decay_style="cosine") == pytest.approx([*expected, 0.1])


def test_a_warm_up_of_a_fraction() -> None:
    found = rates(8, lr_decay_style="linear", lr_warmup_fraction=0.5)
    assert found == rates(8, lr_decay_style="linear", lr_warmup_iters=4)
    # A tenth of 25 iterations are two and a half: no step has the whole rate.
    found = rates(25, lr_decay_style="linear", lr_warmup_fraction=0.1)
    assert found[:4] == pytest.approx([1 / 2.5, 2 / 2.5, 1 - 0.9 * 0.5 / 22.5, 1 - 0.9 * 1.5 / 22.5])
    assert rates(4, lr_warmup_fraction=0.0) == rates(4)


def test_constant() -> None:
    assert rates(4, lr_decay_style="constant", lr_warmup_iters=2) == [0.5, 1.0, 1.0, 1.0]


def test_all_warmup_and_a_floor_above_the_peak() -> None:
    assert rates(3, lr_warmup_iters=6) == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert rates(3, min_lr=5.0) == [1.0, 1.0, 1.0]


@given(st.sampled_from(["cosine", "linear"]), st.integers(0, 30), st.integers(1, 60) | st.none(), st.integers(1, 60))
def test_never_above_the_peak_nor_rising_after_the_warmup(
    style: str, warmup: int, decay: int | None, train_iters: int
) -> None:
    found = rates(train_iters, lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=decay)
    assert all(0.0 < rate <= 1.0 for rate in found)
    after = found[warmup:]
    assert after == sorted(after, reverse=True)
