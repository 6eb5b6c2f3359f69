"""A run's output from a head that may vanish: what is shown, and how its going is noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from queue import Empty

import pytest

from tridock.contracts.run_folder import BEAT, END, LONGEST_LINE
from tridock.errors import ClusterError, Problem
from tridock.ops.runs import logs
from tridock.ops.runs.logs import LogStream

TODO = "the nodes that have lost it end their ranks by themselves; see tridock status once it is back"


class Parts:
    """A stream of these parts; a number waits so many seconds, an error is raised."""

    def __init__(self, parts: Sequence[bytes | float | ClusterError], exit_code: int = 0) -> None:
        self.parts, self.exit_code, self.closed = list(parts), exit_code, False

    def part(self, timeout: float) -> bytes | None:
        part = self.parts.pop(0) if self.parts else None
        if isinstance(part, ClusterError):
            raise part
        if isinstance(part, float):
            if part > timeout:
                time.sleep(timeout)
                raise Empty
            time.sleep(part)
            return self.part(timeout)
        return part

    def close(self) -> None:
        self.closed = True


def test_signs_of_life_are_not_shown() -> None:
    parts = Parts([b"one\n", BEAT, b"two\n" + BEAT, BEAT[:1], BEAT[1:] + b"three\n" + END], exit_code=4)
    stream = LogStream(parts, "a", "run-1")
    assert list(stream) == [b"one\n", b"two\n", b"three\n"]
    assert stream.exit_code == 4
    assert parts.closed


def message(parts: Parts) -> str:
    with pytest.raises(ClusterError) as caught:
        list(LogStream(parts, "a", "run-1"))
    assert parts.closed
    return str(caught.value)


def test_every_byte_of_a_program_is_its_own() -> None:
    printed = bytes(range(256)) + BEAT + END + b"\0\0\0"
    sent = printed.replace(b"\0", b"\0\0") + END
    for size in (1, 2, 3, len(sent)):
        parts = Parts([sent[at : at + size] for at in range(0, len(sent), size)])
        assert b"".join(LogStream(parts, "a", "run-1")) == printed
    for its_own in (b"\4", BEAT, END):
        assert "its node ended while run-1" in message(Parts([its_own.replace(b"\0", b"\0\0")], exit_code=137))


def test_lines_of_nodes_that_their_reader_does_not_read_wait_there() -> None:
    read = {"a": 0, "b": 0}

    class Printing:
        def __init__(self, node: str) -> None:
            self.exit_code, self.node = 0, node

        def __iter__(self) -> Iterator[bytes]:
            for number in range(1000):
                read[self.node] += 1
                yield f"{self.node} {number}\n".encode() * 4000 if number else b"x" * (LONGEST_LINE + 1)

        def close(self) -> None:
            pass

    mixed = logs._mixed({node: Printing(node) for node in read})  # type: ignore[misc]
    first = [next(mixed) for _ in range(4)]
    time.sleep(0.3)
    assert sum(read.values()) < 12, "they wait in memory"
    assert b"x" * (LONGEST_LINE + 1) in first, "a line without end"
    mixed.close()


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
    said = message(Parts([b"one\n", 0.1, BEAT, 9999.0]))
    assert time.monotonic() - began >= 0.4
    assert said == f"a: has said nothing for 0 s while run-1 was followed; {TODO}"
