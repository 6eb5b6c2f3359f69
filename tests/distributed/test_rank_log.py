"""A rank's log if another process keeps its pipe open, or its terminal is slow."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.train.test_rank_log import LINES, PROGRAM, run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("holder", ["exec sleep 9999", "while :; do echo noise; sleep 0.01; done"])
def test_a_process_left_behind_that_holds_the_pipe_does_not_hold_the_rank(tmp_path: Path, holder: str) -> None:
    """One that says nothing more, and one that never stops."""
    begin = time.monotonic()
    start = f"left = subprocess.Popen(['sh', '-c', 'echo from it; : >said; {holder}'], cwd=sys.argv[1])"
    wait = "while not Path(sys.argv[1], 'said').exists(): time.sleep(0.01)"
    end = "os.write(1, b'last words\\n'); log.close(); left.kill(); print('afterwards')"
    code, shown, kept = run(tmp_path, f"{start}\n{wait}\n{end}")
    assert time.monotonic() - begin >= 3.0
    assert (code, shown) == (0, kept + "afterwards\n")
    # The copy of what never stops may end in the middle of a line.
    said = [line for line in kept.splitlines() if not "noise".startswith(line)]
    assert said == [*LINES.splitlines(), "from it", "last words"]


def test_a_slow_terminal_gets_everything_though_the_pipe_stays_open(tmp_path: Path) -> None:
    """The copy has to finish while it waits for the terminal, with most of the text still in the pipe."""
    text = "x" * 79 + "\n"
    lines = 1300  # more than a pipe holds, less than two
    end = f"left = subprocess.Popen(['sleep', '9999']); sys.stdout.write({text!r} * {lines}); log.close(); left.kill()"
    program = PROGRAM.replace("END", end)
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(5.0)
        assert process.poll() is None
        shown, _ = process.communicate(timeout=STEP_S)
    assert process.returncode == 0
    assert shown == (tmp_path / "logs/rank-3.log").read_text() == LINES + text * lines
