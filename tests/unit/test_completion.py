"""The shell completes what the parsers know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASK = """
source <(tridock completion bash)
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete tridock
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tridock la", ["launch"]),
        ("tridock launch --ho", ["--hosts"]),
        ("tridock data sync --hosts hostfiles/exa", ["hostfiles/example"]),
    ],
)
def test_bash_completes_commands_options_and_files(line: str, offered: list[str]) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    argv = ["bash", "-c", ASK, "bash", line]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef tridock"), ("fish", "complete --command tridock")])
def test_other_shells_have_a_script(shell: str, mark: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tridock.cli", "completion", shell], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert mark in done.stdout
