"""Two processes that append to one file at the moment in which its disk is full."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts import appends

OTHER = """
import sys
from pathlib import Path
from tridock.contracts import appends
appends._LOCK_S = 60.0
print("here", flush=True)
appends.append(Path(sys.argv[1]), b'{"by": "other"}\\n')
"""


def test_a_line_that_was_cut_off_does_not_take_the_other_writers_line_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    write, others = os.write, []

    def write_a_part(descriptor: int, data: bytes) -> int:
        """The disk has room for half of it; while the writer looks at that, another process appends."""
        monkeypatch.setattr(os, "write", write)
        written = write(descriptor, data[: len(data) // 2])
        argv = [sys.executable, "-P", "-c", OTHER, str(path)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        others.append(other := subprocess.Popen(argv, stdout=subprocess.PIPE, env=env))
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        with suppress(subprocess.TimeoutExpired):
            other.wait(0.3)
        return written

    monkeypatch.setattr(os, "write", write_a_part)
    appends.append(path, b'{"by": "one", "number": 1}\n')
    (other,) = others
    assert other.wait(STEP_S) == 0
    assert appends.flush(0.0)
    assert sorted(json.loads(line)["by"] for line in path.read_text().splitlines()) == ["one", "other"]


def test_a_writer_that_is_suspended_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(appends, "_LOCK_S", 0.01)
    with path.open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        appends.append(path, b"first\n")
    assert path.read_bytes() == b"first\n"


def test_what_finds_no_room_waits_for_the_next_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "events.jsonl", os.open

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    appends.append(path, b"first\n")
    assert not appends.flush(0.0)
    monkeypatch.setattr(os, "open", real)
    appends.append(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


PRINTER = """
import sys
from tridock.contracts.appends import printing_to_a_full_disk
with printing_to_a_full_disk():
    for line in sys.stdin:
        print(line, end="", flush=True)
        sys.stdout.buffer.write(b"and bytes\\n")
        sys.stdout.buffer.flush()
        print("done", file=sys.stderr)
print("after", flush=True)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_printed_to_a_full_disk_is_dropped_and_counted(tmp_path: Path, unbuffered: str) -> None:
    size = 1 << 16
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", tmp_path], check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        log, filler, pipe = tmp_path / "log", tmp_path / "filler", subprocess.PIPE
        argv = [sys.executable, "-P", "-c", PRINTER]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONUNBUFFERED": unbuffered}
        with (
            log.open("wb") as file,
            subprocess.Popen(argv, stdin=pipe, stdout=file, stderr=pipe, env=env, text=True) as printer,
        ):
            assert printer.stdin is not None
            assert printer.stderr is not None
            for text in ("one", "x" * 9000, "two"):
                if len(text) > 3:
                    filler.write_bytes(bytes(size - os.sysconf("SC_PAGESIZE")))
                else:
                    filler.unlink(missing_ok=True)
                print(text, file=printer.stdin, flush=True)
                assert printer.stderr.readline() == "done\n"
            printer.stdin.close()
            assert printer.wait() == 0
        fitted = os.sysconf("SC_PAGESIZE") - len("one\nand bytes\n")
        lost = 9001 + len("and bytes\n") - fitted
        expected = f"one\nand bytes\n{'x' * fitted}\n[{lost} bytes did not fit on the disk]\ntwo\nand bytes\nafter\n"
        assert log.read_text() == expected
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
