"""Which rank failed first, out of what the nodes hold of events.jsonl."""

from __future__ import annotations

import json

import pytest

from tridock.ops.first_failure import FirstFailure, first_failure

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def failed(rank: int, second: int, reason: str = "boom", **kind: bool) -> bytes:
    event = {"time": f"2026-01-01T00:00:{second:02d}.000+00:00", "event": "run_failed", "rank": rank, "reason": reason}
    return json.dumps({**event, **kind}).encode() + b"\n"


def test_a_rank_that_lost_another_is_not_first_whatever_its_clock_says() -> None:
    lost = failed(0, 1, "collective: another rank has gone", consequence=True)
    own = failed(3, 9, "RuntimeError('boom')\nand a trace")
    expected = FirstFailure(3, "b", "RuntimeError('boom')")
    assert first_failure({"a": lost, "b": own}, NODES) == expected
    assert first_failure({"a": lost + own, "b": lost + own}, NODES) == expected
    assert str(expected) == "rank 3 on b first: RuntimeError('boom')"


def test_of_two_the_earlier() -> None:
    assert first_failure({"a": failed(1, 5), "b": failed(2, 4)}, NODES) == FirstFailure(2, "b", "boom")


def test_what_all_agreed_on_is_nobodys() -> None:
    found = first_failure({"a": failed(0, 1, "train.load: holds no checkpoint", agreed=True), "b": b""}, NODES)
    assert str(found) == "every rank: train.load: holds no checkpoint"


@pytest.mark.parametrize("content", [b"", b'{"event": "run_started"}\n', b'{"event": "run_fai', b"[1]\n\xff\n"])
def test_no_failure_on_record(content: bytes) -> None:
    assert first_failure({"a": content}, NODES) is None


def test_a_rank_without_words() -> None:
    found = first_failure({"a": failed(7, 1, "")}, NODES)
    assert str(found) == "rank 7 on an unknown node first: no reason on record"
