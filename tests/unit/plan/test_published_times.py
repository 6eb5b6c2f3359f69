"""The estimates of an iteration's time and of memory against published runs (tests/data/planner-times.yaml), planned
with what is known of their programs: a regression set, which has shaped constants."""

import statistics
from functools import cache

import pytest

from tests.planner.compare import Compared, compared, median_error, ran_out, rankings, spearman, tables, timed

NAMES = [table["name"] for table in tables()]
TIMED = [table["name"] for table in tables() if "time_unknown" not in table]
KNOWN = {
    "moe-model-zoo-gb200-qwen3-235b-a22b": 0.23,  # its dispatcher and CUDA graphs are faster than the engine's
    "nemo-22.08-a100-175b": 0.28,  # 38 % slower than a release before with the layout that both publish
    "nemo-24.03-h100-long": 0.17,  # the global batch is not published
    "mt-nlg-530b": 0.25,  # a run with its own stalls: 126 TFLOP/s where the same layout reached 171 a year before
}
"""Tables whose median error is above the limit."""
DISORDERED = {
    ("hagemann-2023", "13B on 32"): (0.55, 0.0),
    ("hagemann-2023", "30B on 256"): (0.80, 0.06),
}
"""Models whose layouts come in the wrong order: the least correlation, and how much slower the first choice is. 13B's
time grows with the micro-batch in two stages, for which no cause was found in its source; on 256 GPUs an iteration
takes 2 to 9 s more, the more weights a GPU has, than the same layouts on 64 explain."""
LIMIT = 0.155


@cache
def rows_of(name: str) -> list[Compared]:
    return compared(next(table for table in tables() if table["name"] == name))


@pytest.mark.parametrize("name", TIMED)
def test_the_median_error_of_a_table(name: str) -> None:
    error = median_error(rows_of(name))
    assert error <= KNOWN.get(name, LIMIT)
    assert name not in KNOWN or error > LIMIT, "no longer an exception"


def test_the_median_error_of_all() -> None:
    rows = timed([row for name in NAMES for row in rows_of(name)])
    assert len(rows) > 650
    assert median_error(rows) <= 0.08
    assert abs(statistics.median(row.error for row in rows)) <= 0.06


def test_the_order_of_layouts_and_the_first_choice() -> None:
    """Of every model with six measured layouts or more."""
    ranked = {(name, model): (order, regret) for name in NAMES for model, _, order, regret in rankings(rows_of(name))}
    assert len(ranked) >= 17
    wrong = {key: found for key, found in ranked.items() if found[0] < 0.8 or found[1] > 0.05}
    assert wrong.keys() == DISORDERED.keys()
    assert all(wrong[key][0] >= least and wrong[key][1] <= most for key, (least, most) in DISORDERED.items())


def test_what_ran_is_not_refused() -> None:
    refused = [(name, row.label) for name in NAMES for row in rows_of(name) if row.memory.verdict == "no-fit"]
    assert refused == []


def test_what_ran_out_of_memory_is_not_called_fits() -> None:
    verdicts = [plan.verdict for table in tables() for _, plan in ran_out(table)]
    assert len(verdicts) > 200
    assert "fits" not in verdicts


def test_no_run_above_90_percent_of_its_gpu_is_called_fits() -> None:
    full = [
        ((name, row.label), row.memory.verdict)
        for name in NAMES
        for row in rows_of(name)
        if row.memory.measured is not None and row.memory.measured > 0.9 * row.memory.gpu
    ]
    assert len(full) >= 14
    assert [key for key, verdict in full if verdict != "tight"] == []


def test_the_median_error_of_memory() -> None:
    errors = [row.memory.error for name in NAMES for row in rows_of(name) if row.memory.measured is not None]
    assert len(errors) >= 100
    assert statistics.median(map(abs, errors)) <= 0.05
    assert abs(statistics.median(errors)) <= 0.04


def test_the_memory_that_torch_allocated() -> None:
    """Without what can only be bounded: context, NCCL, fragmentation."""
    names = [table["name"] for table in tables() if table.get("memory_is") == "allocated"]
    errors = {name: [abs(row.memory.error) for row in rows_of(name)] for name in names}
    own = errors.pop("tridock-h100-megatron-core")  # on a bare machine: Adam has temporary tensors
    assert max(own) <= 0.055
    found = [error for them in errors.values() for error in them]
    assert len(found) == 33
    assert statistics.median(found) <= 0.01
    assert max(found) <= 0.025


def test_a_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
