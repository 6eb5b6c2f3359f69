"""Lines of a program's progress bars, which end with carriage returns."""

from __future__ import annotations

import pytest

from tridock.node.progress_lines import ProgressLines


def test_a_bar_shows_its_newest_state_once_a_second_and_its_last_one() -> None:
    now = [0.0]
    lines = ProgressLines(lambda: now[0])
    shown = b""
    for percent in range(101):
        now[0] = percent / 10
        shown += lines.add(b"\r%3d%%|####" % percent)
    shown += lines.add(b"\nnext\n")
    assert shown.split() == [b"%d%%|####" % it for it in (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)] + [b"next"]


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (b"one\r\ntwo\r\n", b"one\ntwo\n"),
        (b"bar 1\rbar 2\r      \rsaved\n", b"saved\n"),
        (b"\n\nhalf", b"\n\nhalf"),
        (b"a\rb", b"b"),
        (b"", b""),
    ],
)
def test_output_in_any_parts(output: bytes, shown: bytes) -> None:
    for size in (1, 2, 3, len(output) or 1):
        lines = ProgressLines(lambda: 0.0)
        assert lines.add(b"\rfirst") + lines.add(b"\n") == b"first\n"  # so that no state is due
        parts = [lines.add(output[first : first + size]) for first in range(0, len(output), size)]
        assert b"".join(parts) + lines.rest() == shown


def test_a_state_that_waited_is_shown_without_more_output() -> None:
    now = [0.0]
    lines = ProgressLines(lambda: now[0])
    assert lines.add(b"\r1%") == b"1%\n"
    assert lines.add(b"\r2%") == b""
    now[0] = 1.0
    assert (lines.state(), lines.state()) == (b"2%\n", b"")
    assert lines.add(b"\n") == b""
