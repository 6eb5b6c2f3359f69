"""Records of a run, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tridock.contracts.records import read_lines, read_metrics, read_plan
from tridock.contracts.run_state import exit_code_of
from tridock.errors import RequestError


def test_damaged_metrics_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    lines = ["[" * 100_000, "null", '{"iteration": "1"}', json.dumps({"iteration": 1, "loss": [3], "lr": 10**400})]
    lines += [json.dumps({"iteration": 2, "loss": 2.5, "lr": True}), '{"iteration": 3, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    iterations, evaluations = read_metrics(tmp_path)
    assert iterations == [{"iteration": 1, "loss": None, "lr": None}, {"iteration": 2, "loss": 2.5, "lr": None}]
    assert evaluations == {}


def test_metrics_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RequestError) as caught:
        read_metrics(tmp_path)
    todo = "make it a file that you can read"
    assert str(caught.value) == f"{tmp_path}/metrics.jsonl: cannot be read; got Is a directory; {todo}"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"ranks": 3}', '{"ranks": [{"rank": 0}]}', "[]", "\0"])
def test_a_damaged_plan_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(tmp_path) == {}


@pytest.mark.parametrize(("content", "code"), [(b"4\n", 4), (b"", None), (b"true\n", None), (b"\xff", None)])
def test_an_exit_code_that_cannot_be_read_is_none(content: bytes, code: int | None, tmp_path: Path) -> None:
    (tmp_path / "exit_code").write_bytes(content)
    assert exit_code_of(tmp_path) == code


def test_half_of_a_surrogate_pair_is_text_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"layout": "no\\ud800de \\uD83D\\uDE00", "ranks": []}')
    (tmp_path / "events.jsonl").write_text('{"event": "\\uDC00"}\n')
    assert read_plan(tmp_path)["layout"] == "no?de \U0001f600"
    assert read_lines(tmp_path / "events.jsonl") == [{"event": "?"}]
