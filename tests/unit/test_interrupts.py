"""Ctrl-C while the modules of a command load, and while its process ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import STEP_S

ROOT = Path(__file__).parents[2]
CTRL_C = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def run(*arguments: str, modules: Path | None = None, ignored: bool = False) -> tuple[int, str, str]:
    path = os.pathsep.join(str(each) for each in (modules, ROOT) if each)
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=STEP_S,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("command", "module"), [("tridock.cli", "argparse"), ("tridock.cli.fab", "fabric")])
def test_ctrl_c_while_modules_load_has_no_traceback(tmp_path: Path, command: str, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(CTRL_C)
    assert run("-m", command, "--version", modules=tmp_path) == (130, "", "interrupted\n")


def test_ctrl_c_at_the_end_has_no_traceback() -> None:
    program = f"import atexit, sys\n@atexit.register\ndef end():\n    {CTRL_C.strip().replace(chr(10), '; ')}\n"
    program += "from tridock.cli.__main__ import run\nsys.argv[1:] = ['runs', '--help']\nrun()\n"
    code, printed, errors = run("-c", program)
    assert (code, errors) == (130, "interrupted\n")
    assert printed.lower().startswith("usage:")


def test_ctrl_c_stays_ignored_under_nohup() -> None:
    program = "from tridock.cli.interrupts import end_at_once, raised\nend_at_once()\nwith raised():\n    "
    assert run("-c", program + CTRL_C.strip().replace("\n", "; ") + "; print('continues')", ignored=True) == (
        0,
        "continues\n",
        "",
    )


TWICE = """
import os, signal, time
from tridock.cli import interrupts
from tridock.cli.interrupts import end_at_once, raised

end_at_once()
with raised():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        print("cleaned up")
    time.sleep(1.2 * interrupts._ONE_S)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted again")
"""


def test_two_at_once_are_one_and_a_later_one_is_another() -> None:
    """The second would end the cleanup that the first has begun."""
    assert run("-c", TWICE) == (0, "cleaned up\ninterrupted again\n", "")
