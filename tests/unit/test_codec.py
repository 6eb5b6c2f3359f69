"""Typed data survives JSON, and anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass

import pytest

from tridock.contracts.codec import FormError, SchemaMismatchError, decode, encode, schema_digest
from tridock.contracts.forms import NameBelow, NodeName, RunId, Sha256
from tridock.contracts.mesh_answers import MeshAnswer, Route
from tridock.contracts.node_answers import (
    Evidence,
    IndexMaps,
    PlacedCode,
    PortAnswer,
    Process,
    QueuedRun,
    RunInfo,
    SshAnswer,
)
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
    {0: None, 1: Route("192.0.2.1", "192.0.2.2", "eth0")},
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


@dataclass(frozen=True)
class Reported:
    run_id: RunId
    nodes: Mapping[NodeName, tuple[Sha256, ...]] = field(default_factory=dict)
    kept: NameBelow | None = None


ID = "demo-20261122-110613-14b7"


def test_forms_of_text_are_checked_where_it_is_read() -> None:
    for data in (Reported(ID), Reported(ID, {"gpu-1": ("a" * 64,), "fe80::1%eth0": ()}, "pkg/a.py")):
        assert decode(Reported, encode(data)) == data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (Reported("../../../data"), "'../../../data' is no run id"),
        (Reported(f"{ID}\n"), f"'{ID}\\n' is no run id"),
        (Reported(ID, {"-oProxyCommand=x": ()}), "'-oProxyCommand=x' is no name of a node"),
        (Reported(ID, {"../x": ()}), "'../x' is no name of a node"),
        (Reported(ID, {"a": ("../.ssh/id",)}), "'../.ssh/id' is no SHA-256"),
        (Reported(ID, {}, "/etc/passwd"), "'/etc/passwd' is no name below a folder"),
        (Reported(ID, {}, "a/../../b"), "'a/../../b' is no name below a folder"),
    ],
)
def test_a_text_of_another_form_is_refused(data: Reported, why: str) -> None:
    with pytest.raises(FormError) as caught:
        decode(Reported, encode(data))
    assert str(caught.value) == why


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        (RunInfo, {"run_id": "../../../data"}, "'../../../data' is no run id"),
        (RunInfo, {"nodes": ["a/b"]}, "'a/b' is no name of a node"),
        (RunInfo, {"created": "now"}, "'now' is no time as yyyymmdd-hhmmss"),
        (QueuedRun, {"waits_for": ["x"]}, "'x' is no run id"),
        (Process, {"run_id": "--workspace=/"}, "'--workspace=/' is no run id"),
        (PlacedCode, {"missing": ["../x"]}, "'../x' is no SHA-256"),
        (
            IndexMaps,
            {"files": ["../../.ssh/authorized_keys"]},
            "'../../.ssh/authorized_keys' is no name of an index map",
        ),
        (IndexMaps, {"files": ["train.py"]}, "'train.py' is no name of an index map"),
    ],
)
def test_what_nodes_answer_has_these_forms(kind: type, data: dict[str, object], why: str) -> None:
    whole = {
        RunInfo: RunInfo(ID, RunState.LOST, None, "20261122-110613", None, "demo", ("gpu-1",), None, None, None),
        QueuedRun: QueuedRun(ID, "gpu-1", 0.0, {}, ()),
        Process: Process(ID, 1, 1, (), 0.0, 0.0),
        PlacedCode: PlacedCode(("a" * 64,)),
        IndexMaps: IndexMaps(1, ("demo_train_indexmap_8ns_doc_idx.npy", "demo_indexmap.sha256")),
    }[kind]
    text = encode(whole)
    assert decode(kind, text) == whole
    with pytest.raises(FormError) as caught:
        decode(kind, json.dumps({**json.loads(text), **data}))
    assert str(caught.value) == why
