"""The estimate of an iteration's time against published runs (tests/data/planner-times.yaml)."""

import statistics
from functools import cache

import pytest

from tests.planner.compare import Compared, compared, median_error, planned, rankings, spearman, tables

HELD_OUT = [table["name"] for table in tables() if table["use"] == "held out"]
KNOWN = {
    "mt-nlg-530b": 0.25,  # a run with its own stalls: 126 TFLOP/s where the same layout reached 171 a year before
    "torchtitan-8b": 0.35,  # H100 with HBM2e and 500 W, and partial recomputation
}
"""Tables whose median error is above the limit."""
DISORDERED = {
    ("hagemann-2023", "13B on 64"): (0.80, 0.25),
    ("hagemann-2023", "13B on 32"): (0.45, 0.11),
    ("hagemann-2023", "30B on 256"): (0.80, 0.06),
}
"""Models whose layouts come in the wrong order: the least correlation, and how much slower the first choice is. The
program keeps gradients in bf16, for which engine megatron-core has no field: with half the bytes the first choice is
right in the first two."""
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
    assert len(ranked) >= 18
    wrong = {key: found for key, found in ranked.items() if found[0] < 0.8 or found[1] > 0.05}
    assert wrong.keys() == DISORDERED.keys()
    assert all(wrong[key][0] >= least and wrong[key][1] <= most for key, (least, most) in DISORDERED.items())


def test_what_ran_is_not_refused() -> None:
    """Except four tables: torchtitan recomputed every other layer, for which there is no field; Llama 3's interleaving
    is not published, and with ours its activations take 69 GiB; Hagemann's program keeps gradients in bf16."""
    refused = {table["name"] for table in tables() if not all(row.fits for row in rows_of(table["name"]))}
    assert refused == {"torchtitan-8b", "torchtitan-70b", "llama-3-405b", "hagemann-2023"}


def test_what_ran_out_of_memory_is_not_called_fits() -> None:
    """But for samples of 8,192 tokens, two and more at a time, of a program that keeps all logits in fp32."""
    called = [
        (row["model"], row["batch.micro_batch_size"], plan.verdict)
        for table in tables()
        for row in (dict(zip(table["columns"], values, strict=True)) for values in table.get("out_of_memory", ()))
        for plan in [planned(table, {**table["fields"], **row})]
    ]
    assert len(called) > 200
    fit = [(model, micro) for model, micro, verdict in called if verdict == "fits"]
    assert all("8k" in model and micro > 1 for model, micro in fit)
    assert len(fit) <= 16


def test_a_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
