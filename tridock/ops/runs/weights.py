"""What `tridock export` does: a run's weights, in a process that has torch."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tridock.contracts.run_folder import EXPERIMENT
from tridock.errors import ClusterError, Problem, RequestError

EXPORT: Final = "tridock.train.huggingface.export"


def run_program(module: str, arguments: Sequence[str]) -> int:
    """Runs a program of the ranks' room; returns its exit code. Raises :class:`ClusterError` without torch."""
    if find_spec("torch") is None:
        todo = "use the image (docker compose run trainer tridock …), or pip install 'tridock[train]'"
        raise ClusterError(Problem("torch", "is not installed", "", todo))
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


def check_run(run: Path) -> None:
    """Raises :class:`RequestError` if ``run`` is no run's folder."""
    if not (run / EXPERIMENT).is_file():
        raise RequestError(Problem(str(run), f"holds no {EXPERIMENT}", "", "give runs/<run-id>"))
