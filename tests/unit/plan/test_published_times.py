"""The estimate of an iteration's time against published runs (tests/data/planner-times.yaml)."""

import statistics
from functools import cache

import pytest

from tests.planner.compare import Compared, compared, median_error, rankings, spearman, tables

HELD_OUT = [table["name"] for table in tables() if table["use"] == "held out"]
KNOWN = {
    "mt-nlg-530b": 0.25,  # a run with its own stalls: 126 TFLOP/s where the same layout reached 171 a year before
    "torchtitan-8b": 0.35,  # H100 with HBM2e and 500 W, and partial recomputation
}
"""Tables whose median error is above the limit."""
LIMIT = 0.155


@cache
def rows_of(name: str) -> list[Compared]:
    return compared(next(table for table in tables() if table["name"] == name))


@pytest.mark.parametrize("name", [table["name"] for table in tables()])
def test_the_median_error_of_a_table(name: str) -> None:
    error = median_error(rows_of(name))
    assert error <= KNOWN.get(name, LIMIT)
    assert name not in KNOWN or error > LIMIT, "no longer an exception"


def test_the_median_error_of_what_no_constant_was_set_with() -> None:
    rows = [row for name in HELD_OUT for row in rows_of(name)]
    assert len(rows) > 250
    assert median_error(rows) <= 0.11
    assert abs(statistics.median(row.error for row in rows)) <= 0.09


def test_the_order_of_layouts_and_the_first_choice() -> None:
    """Of every model with six measured layouts or more."""
    ranked = {
        (name, model): (order, regret) for name in HELD_OUT for model, _, order, regret in rankings(rows_of(name))
    }
    assert len(ranked) >= 9
    assert {key: found for key, found in ranked.items() if found[0] < 0.8 or found[1] > 0.05} == {}


def test_what_ran_is_not_refused() -> None:
    """Except three tables: torchtitan recomputed every other layer, for which there is no field, and Llama 3's rows
    probably shard gradients and keep fewer micro-batches in flight (not checked against the paper)."""
    refused = {table["name"] for table in tables() if not all(row.fits for row in rows_of(table["name"]))}
    assert refused == {"torchtitan-8b", "torchtitan-70b", "llama-3-405b"}


def test_a_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
