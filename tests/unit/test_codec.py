"""Typed data survives JSON, and anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tridock.contracts.codec import decode, encode
from tridock.contracts.node_answers import Evidence, MeshAnswer, PortAnswer, Route, SshAnswer
from tridock.contracts.run_state import RunState
from tridock.errors import Problem


@dataclass(frozen=True)
class Sample:
    state: RunState
    seconds: float
    ports: tuple[PortAnswer, ...] = ()
    by_rank: Mapping[int, Route | None] = field(default_factory=dict)


SAMPLE = Sample(
    RunState.LOST,
    2.5,
    (PortAnswer(1), PortAnswer(problem=Problem("a", "is wrong", "b", "mend it", (1, "x")))),
    {0: None, 1: Route("10.0.0.1", "10.0.0.2", "eth0")},
)


@pytest.mark.parametrize("data", [SAMPLE, Evidence(), MeshAnswer(SshAnswer(None, "", "late"))], ids=lambda it: type(it))
def test_data_is_read_as_it_was_written(data: object) -> None:
    assert decode(type(data), encode(data)) == data


def test_several_are_read_by_node() -> None:
    assert decode(dict[str, Sample], encode({"a": SAMPLE})) == {"a": SAMPLE}
    assert decode(tuple[Sample, ...], encode([SAMPLE, SAMPLE])) == (SAMPLE, SAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        "{}",
        '{"state": "lost"}',
        '{"state": "gone", "seconds": 1}',
        '{"state": "lost", "seconds": "1"}',
        '{"state": "lost", "seconds": 1, "more": 2}',
        '{"state": "lost", "seconds": 1, "ports": 3}',
        '{"state": "lost", "seconds": 1, "by_rank": {"x": null}}',
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not of type|Expecting value|gone|invalid literal"):
        decode(Sample, text)
