"""A run's output from a head that may vanish: what is shown, and how its going is noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from tridock.errors import ClusterError, Problem
from tridock.ops.runs import logs
from tridock.ops.runs.logs import LogStream

TODO = "the nodes that have lost it end their ranks by themselves; see tridock status once it is back"


class Parts:
    """A stream of these parts; a number waits so many seconds, an error is raised."""

    def __init__(self, parts: Sequence[bytes | float | ClusterError], exit_code: int = 0) -> None:
        self.parts, self.exit_code, self.closed = parts, exit_code, False

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            if isinstance(part, ClusterError):
                raise part
            if isinstance(part, float):
                time.sleep(part)
            else:
                yield part

    def close(self) -> None:
        self.closed = True


def test_signs_of_life_are_not_shown() -> None:
    parts = Parts([b"one\n", b"\0", b"two\n\0", b"\0", b"three\n\4"], exit_code=4)
    stream = LogStream(parts, "a", "run-1")
    assert list(stream) == [b"one\n", b"two\n", b"three\n"]
    assert stream.exit_code == 4
    assert parts.closed


def message(parts: Parts) -> str:
    with pytest.raises(ClusterError) as caught:
        list(LogStream(parts, "a", "run-1"))
    assert parts.closed
    return str(caught.value)


def test_an_output_that_is_cut_short() -> None:
    said = message(Parts([b"one\n"], exit_code=137))
    assert said == f"a: its node ended while run-1 was followed; got exit code 137; {TODO}"


def test_a_connection_that_is_lost() -> None:
    lost = ClusterError(Problem("a", "the connection was lost while `x` ran", "Connection reset by peer", "try again"))
    said = message(Parts([b"one\n", lost]))
    assert said == f"a: the connection to it was lost while run-1 was followed; got Connection reset by peer; {TODO}"


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "SILENCE_S", 0.4)
    began = time.monotonic()
    said = message(Parts([b"one\n", 0.1, b"\0", 30.0]))
    assert 0.4 <= time.monotonic() - began < 25.0
    assert said == f"a: has said nothing for 0 s while run-1 was followed; {TODO}"
