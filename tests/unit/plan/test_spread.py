"""The ranges of a plan: what `make bench-planner` computes from published runs, as a user has them."""

import statistics
from typing import Any

import pytest

from tests.experiments import SMALL, with_fields
from tests.planner import errors
from tridock.cli.program import main
from tridock.gpus import GPUS
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.correction import Correction
from tridock.plan.spread import PATH, RunClass, memory_spread, time_spreads

A100 = GPUS["a100-80gb"]
EVERY = errors.timed(errors.rows())


def test_the_ranges_are_those_of_the_published_runs() -> None:
    assert PATH.read_text() == errors.as_text(), "run `make bench-planner`"
    assert errors.BEGIN + errors.documented() + errors.END in errors.DOCUMENT.read_text(), "run `make bench-planner`"


def test_ranges_hold_for_runs_of_other_publications() -> None:
    assert statistics.mean(map(errors.time_holds, EVERY)) >= 0.9
    assert len(errors.of_memory()) > 100
    assert statistics.mean(map(errors.memory_holds, errors.of_memory())) >= 0.9


def test_the_median_error_of_an_estimate() -> None:
    """Its class's median is that of other publications."""
    small = [row for row in EVERY if not (row.run_class.many or row.run_class.experts)]
    assert statistics.median(abs(errors.typical_error(row)) for row in small) <= 0.12
    assert statistics.median(abs(errors.typical_error(row)) for row in EVERY) <= 0.13


def planned(assumptions: Assumptions, nodes: int = 1, **fields: Any) -> Assessment:
    experiment = with_fields(SMALL, {"batch.global_batch_size": 48 * nodes, **fields})
    return assess(experiment, {f"node-{number}": range(8) for number in range(nodes)}, "e", assumptions)


def test_an_estimate_lies_in_the_range_of_its_class() -> None:
    assessment = planned(Assumptions(A100))
    assert assessment.cost is not None
    found = assessment.cost.estimate
    assert found is not None
    spread = time_spreads()[RunClass("torch", experts=False, many=False, measured=True)]
    known = found.iteration - found.unexplained
    assert found.iteration == pytest.approx(known * spread.typical)
    assert found.seconds_range == pytest.approx((known * spread.low, known * spread.high))
    estimate = assessment.document()["cost"]["estimate"]
    assert estimate["seconds_range"][0] < estimate["iteration"] < estimate["seconds_range"][1]
    for low, value, high in (
        (estimate["days_range"][0], estimate["days"], estimate["days_range"][1]),
        (estimate["tokens_per_second_range"][0], estimate["tokens_per_second"], estimate["tokens_per_second_range"][1]),
    ):
        assert low < value < high


@pytest.mark.parametrize(
    ("gpu", "nodes", "many", "measured"),
    [("h200", 1, False, True), ("h100-80gb", 17, True, True), ("l40s", 1, False, False), ("rtx-4090", 17, True, False)],
)
def test_the_class_of_a_run(gpu: str, nodes: int, many: bool, measured: bool) -> None:
    cost = planned(Assumptions(GPUS[gpu]), nodes).cost
    assert cost is not None
    assert cost.rates.spread == time_spreads()[RunClass("torch", experts=False, many=many, measured=measured)]


def test_a_plan_that_a_run_corrects_has_the_range_of_such_plans() -> None:
    by = Correction("runs/x", A100, 9, 1.0, 1.0, 2.0, (), 2**30, 2**29)
    plain, corrected = planned(Assumptions(A100)), planned(Assumptions(A100, correction=by))
    assert plain.cost is not None
    assert corrected.cost is not None
    before, after = plain.cost.rates.spread, corrected.cost.rates.spread
    assert before is not None
    assert after is not None
    assert after.typical == before.typical
    assert after.sources > before.sources
    assert corrected.worst is not None
    assert corrected.worst.most_bytes == corrected.worst.total_bytes


def test_memory_has_an_upper_end_within_the_gpu() -> None:
    for gpu, fields in (("a100-80gb", {}), ("t4", {"model.hidden_size": 8192, "model.num_layers": 2})):
        worst = planned(Assumptions(GPUS[gpu]), **fields).worst
        assert worst is not None
        most = round(memory_spread(described=False).high * worst.total_bytes)
        assert worst.most_bytes == max(worst.total_bytes, min(most, GPUS[gpu].memory_bytes))
    assert planned(Assumptions(A100)).document()["memory"]["stages"][0]["most_gib"] > 0


def test_a_search_has_ranges_and_says_when_its_order_is_not_reliable(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--config", "configs/demo-3d.yaml", "--nodes", "1", "--gpu", "h100", "--search"]
    dense = ["--set", "model.add_bias_linear=false"]
    assert main([*arguments, *dense]) == 0
    text = capsys.readouterr().out
    spread = time_spreads()[RunClass("megatron-core", experts=False, many=False, measured=True)]
    ends = f"{spread.low / spread.typical:.2f} to {spread.high / spread.typical:.2f}"
    assert f"each time has a range of {ends} times it, as of {spread.runs} published runs" in text
    assert "not reliable" not in text
    assert main([*arguments, *dense, "--set", "model.num_moe_experts=4"]) == 0
    assert "the order of layouts with experts is not reliable" in capsys.readouterr().out
