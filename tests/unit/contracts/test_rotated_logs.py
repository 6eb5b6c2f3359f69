"""A log that is rotated while it is written and read."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts.rotated_logs import GrowingLog, earlier, rotate, tail

NOTE = b"tridock: earlier output is in rank-0.log.1; what is older is removed\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def test_a_long_log_keeps_one_earlier_part_and_says_so(log: Path) -> None:
    rotate(log, 10)
    log.write_bytes(b"0123456789")
    rotate(log, 10)
    assert (log.read_bytes(), earlier(log).exists()) == (b"0123456789", False)
    with log.open("ab") as writer:  # as the ranks have it
        for text in (b"one\n", b"two\n"):
            writer.write(text)
            writer.flush()
            rotate(log, 10)
            assert log.read_bytes() == NOTE
        writer.write(b"three\n")
    assert earlier(log).read_bytes() == NOTE + b"two\n"
    assert log.read_bytes() == NOTE + b"three\n"
    assert sorted(it.name for it in log.parent.iterdir()) == ["rank-0.log", "rank-0.log.1"]


def test_a_log_that_cannot_be_copied_stays(log: Path) -> None:
    log.write_bytes(b"one\n" * 10)
    earlier(log).write_bytes(b"before")
    log.with_name("rank-0.log.1.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        rotate(log, 10)
    assert (log.read_bytes(), earlier(log).read_bytes()) == (b"one\n" * 10, b"before")


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_misses_and_repeats_nothing(log: Path, seed: int) -> None:
    chance, lines = random.Random(seed), [b"line %d\n" % number for number in range(3000)]
    log.touch()
    seen, reader, done = bytearray(), GrowingLog(log), threading.Event()

    def read() -> None:
        while True:
            is_last = done.is_set()
            while new := reader.read(chance.choice((1, 7, 4096))):
                seen.extend(new)
            if is_last:
                return

    thread = threading.Thread(target=read)
    thread.start()
    with log.open("ab", buffering=0) as writer:
        for number, line in enumerate(lines):
            writer.write(line)
            if number % 500 == 499:
                while len(seen) < sum(map(len, lines[: number - 100])):  # a reader is never two parts behind
                    pass
                rotate(log, 100)
    done.set()
    thread.join(STEP_S)
    assert bytes(seen).replace(NOTE, b"") == b"".join(lines)


def test_a_reader_starts_at_both_parts_or_where_the_log_was(log: Path) -> None:
    log.write_bytes(b"one\n")
    late = GrowingLog(log, 4)
    rotate(log, 3)
    with log.open("ab") as writer:
        writer.write(b"two\n")
    assert GrowingLog(log).read(100) == b"one\n"
    assert (late.read(100), late.read(100)) == (NOTE + b"two\n", b"")


@pytest.mark.parametrize(
    ("most", "first", "expected"),
    [(100, 0, b"one\ntwo\nABC\n"), (6, 0, b"o\nABC\n"), (2, 0, b"C\n"), (100, 6, b"o\nABC\n"), (100, 2, b"C\n")],
)
def test_the_end_of_a_log(log: Path, most: int, first: int, expected: bytes) -> None:
    earlier(log).write_bytes(b"one\ntwo\n")
    log.write_bytes(b"ABC\n")
    assert tail(log, most, first) == expected
    assert tail(log.parent / "none", most, first) == b""
