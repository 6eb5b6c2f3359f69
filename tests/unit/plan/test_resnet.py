"""The planner and a model of images: what it refuses, and what it knows."""

from typing import Any

import pytest

from tests.unit.experiment.test_resnet import experiment
from tridock.errors import RequestError
from tridock.gpus import GPUS
from tridock.plan import Assumptions, assess
from tridock.plan.search import search


def problems(world: int = 2, **fields: Any) -> list[str]:
    return [str(problem) for problem in assess(experiment(**fields), {"a": range(world)}, "x.yaml").problems]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_is_laid_out_as_a_gpt_is(strategy: str) -> None:
    assert problems(**{"parallel.strategy": strategy}) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"engine": "megatron-core"},
            "model.preset: engine megatron-core has no model of images; got resnet50; use engine torch",
        ),
        (
            {"parallel.strategy": "zero"},
            "parallel.strategy: preset resnet50 goes with ddp and fsdp; got zero; use one of them",
        ),
        (
            {"parallel.tensor_model_parallel_size": 2},
            "parallel.tensor_model_parallel_size: preset resnet50 is not split; got 2; set it to 1",
        ),
        (
            {"parallel.pipeline_model_parallel_size": 2},
            "parallel.pipeline_model_parallel_size: preset resnet50 is not split; got 2; set it to 1",
        ),
        ({"train.compile": True}, "train.compile: preset resnet50 is not compiled; got true; leave it out"),
    ],
)
def test_what_it_does_not_go_with(fields: dict[str, Any], said: str) -> None:
    assert said in problems(**fields)


def test_activations_are_not_computed_again() -> None:
    """As a search tries it; an experiment of its own cannot say so."""
    base = experiment()
    again = base.model_copy(update={"model": base.model.model_copy(update={"checkpoint_activations": True})})
    said = [str(problem) for problem in assess(again, {"a": range(2)}, "x.yaml").problems]
    assert said == ["model.checkpoint_activations: preset resnet50 keeps its activations; got true; leave it out"]


def test_memory_and_flops_are_known_and_time_is_where_a_rate_is_given() -> None:
    assessed = assess(experiment(precision="bf16"), {"a": range(2)}, "x.yaml", Assumptions(tflops=50.0))
    terms = {term.name: term.bytes for term in assessed.worst.terms}
    assert terms["weights"] == 4 * 25_557_032
    assert terms["activations"] == 2 * 2 * 21_776_384
    assert assessed.cost is not None
    assert assessed.cost.model_flops == 8 * 3 * 2 * 4_089_184_256
    assert assessed.cost.estimate is not None
    assert assessed.cost.estimate.compute == pytest.approx(assessed.cost.model_flops / 2 / 50e12)


def test_a_search_wants_a_rate() -> None:
    a100 = GPUS["a100-80gb"]
    with pytest.raises(RequestError) as caught:
        search(experiment(), {"a": range(2)}, "x.yaml", Assumptions(a100))
    assert str(caught.value) == (
        "x.yaml: a search needs to know how fast a GPU is with convolutions; give a measured rate with --tflops"
    )
    found = search(experiment(), {"a": range(2)}, "x.yaml", Assumptions(a100, tflops=60.0))
    splits = {(one.experiment.parallel.tensor_model_parallel_size, one.data_parallel_size) for one in found.found}
    assert splits == {(1, 2)}
    assert not any(one.experiment.model.checkpoint_activations for one in found.found)
