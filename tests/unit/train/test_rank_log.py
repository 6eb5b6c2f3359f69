"""Each rank's log holds what the rank and its native code wrote, to the last word."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from tridock.train.rank_log import RankLog
log = RankLog.open(Path(sys.argv[1]), 3)
print("from Python")
print("an error", file=sys.stderr)
os.write(1, b"from native code\\n")
END
"""


def run(tmp_path: Path, end: str) -> tuple[int, str, str]:
    program = PROGRAM.replace("END", end)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return done.returncode, done.stdout, (tmp_path / "logs/rank-3.log").read_text()


LINES = "from Python\nan error\nfrom native code\n"


def test_both_places_hold_everything(tmp_path: Path) -> None:
    code, shown, kept = run(tmp_path, 'log.close(); print("afterwards")')
    assert (code, shown, kept) == (0, LINES + "afterwards\n", LINES)


@pytest.mark.parametrize(
    ("end", "code"),
    [("os._exit(3)", 3), ("os.abort()", -signal.SIGABRT), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_a_sudden_death_loses_nothing(tmp_path: Path, end: str, code: int) -> None:
    assert run(tmp_path, end) == (code, LINES, LINES)


def test_signals_to_the_whole_group_do_not_cut_the_log(tmp_path: Path) -> None:
    program = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(log._child, signal.SIGTERM);"
        "os.kill(log._child, signal.SIGINT); time.sleep(0.2); print('last words'); log.close()"
    )
    assert run(tmp_path, program)[2] == LINES + "last words\n"


def test_a_terminal_that_has_gone_does_not_cut_the_log(tmp_path: Path) -> None:
    program = PROGRAM.replace("END", "time.sleep(0.3); print('after the terminal'); log.close()")
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
    assert (tmp_path / "logs/rank-3.log").read_text() == LINES + "after the terminal\n"


def test_a_second_start_appends(tmp_path: Path) -> None:
    run(tmp_path, "log.close()")
    assert run(tmp_path, "log.close()")[2] == LINES * 2


@pytest.mark.parametrize("holder", ["sleep 60", "while :; do echo noise; sleep 0.01; done"])
def test_a_process_left_behind_that_holds_the_pipe_does_not_hold_the_rank(tmp_path: Path, holder: str) -> None:
    """One that says nothing more, and one that never stops."""
    begin = time.monotonic()
    start = f"left = subprocess.Popen(['sh', '-c', 'echo from it; {holder}']); time.sleep(0.3)"
    end = "os.write(1, b'last words\\n'); log.close(); left.kill(); print('afterwards')"
    code, shown, kept = run(tmp_path, f"{start}; {end}")
    assert 3.0 <= time.monotonic() - begin < 10.0
    assert (code, shown) == (0, kept + "afterwards\n")
    # The copy of what never stops may end in the middle of a line.
    said = [line for line in kept.splitlines() if not "noise".startswith(line)]
    assert said == [*LINES.splitlines(), "from it", "last words"]


def test_a_slow_terminal_gets_everything_though_the_pipe_is_held(tmp_path: Path) -> None:
    """The copy is told to finish while it waits for the terminal, with most of the text still in the pipe."""
    text = "x" * 79 + "\n"
    lines = 1300  # more than a pipe holds, less than two
    end = f"left = subprocess.Popen(['sleep', '60']); sys.stdout.write({text!r} * {lines}); log.close(); left.kill()"
    program = PROGRAM.replace("END", end)
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(5.0)
        assert process.poll() is None
        shown, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert shown == (tmp_path / "logs/rank-3.log").read_text() == LINES + text * lines
