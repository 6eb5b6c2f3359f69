"""Each rank's log holds what the rank and its native code wrote, to the last word."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import STEP_S

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from tridock.train.rank.rank_log import RankLog
log = RankLog.open(Path(sys.argv[1]), 3)
print("from Python")
print("an error", file=sys.stderr)
os.write(1, b"from native code\\n")
END
"""


def run(tmp_path: Path, end: str) -> tuple[int, str, str]:
    program = PROGRAM.replace("END", end)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=STEP_S
    )
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
