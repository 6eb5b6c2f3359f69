"""Typed data survives JSON, and anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass

import pytest

from tridock.contracts.codec import SchemaMismatchError, decode, encode, schema_digest
from tridock.contracts.mesh_answers import MeshAnswer, Route
from tridock.contracts.node_answers import Evidence, PortAnswer, SshAnswer
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
    (PortAnswer(1), PortAnswer(problem=Problem("a", "is wrong", "b", "correct it", (1, "x")))),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"state": "lost", "seconds": 1, "more": 2}', "not of type Sample: Sample has no more here"),
        ('{"seconds": 1}', "not of type Sample: Sample lacks state"),
        ('{"state": "lost", "seconds": "1"}', "not of type Sample: '1' is no float"),
    ],
)
def test_another_form_is_told_apart(text: str, message: str) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        decode(Sample, text)
    assert str(caught.value) == message


def test_the_digest_of_a_form_sees_the_fields_of_its_parts() -> None:
    def form(own: dict[str, type], part: dict[str, type]) -> str:
        whole = [*own.items(), ("parts", tuple[make_dataclass("Part", part.items())])]  # type: ignore[misc]
        return schema_digest(make_dataclass("Whole", whole))

    first = form({"a": int}, {"b": str})
    assert form({"a": int}, {"b": str}) == first
    others = [form({"a": float}, {"b": str}), form({"c": int}, {"b": str}), form({"a": int}, {"b": str, "c": int})]
    assert len({first, *others}) == 4
