"""The memory model against what CPU ranks of every engine hold, tensor by tensor (tests/data/memory-cpu.json)."""

import pytest

from tests.memory.compare import compare, measured

WITHIN = 0.03


@pytest.mark.parametrize("name", measured()["cases"])
def test_a_case(name: str) -> None:
    for one in compare(name):
        if one.what == "parameters":
            assert one.predicted == one.measured, one
        else:
            assert abs(one.error) <= WITHIN, one


def test_there_are_enough_cases_of_every_engine() -> None:
    engines = [case["engine"] for case in measured()["cases"].values()]
    assert {engine: engines.count(engine) >= 20 for engine in engines} == {
        "megatron-core": True,
        "torch": True,
        "megatron-deepspeed": True,
    }
