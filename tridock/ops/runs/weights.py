"""`tridock export` and `generate`: use a run's weights in a process that has torch."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tridock.command import Command
from tridock.contracts.run_folder import EXPERIMENT
from tridock.errors import ClusterError, Problem, RequestError
from tridock.extras import install_command

EXPORT: Final = "tridock.train.huggingface.export"
GENERATE: Final = "tridock.train.huggingface.generate"
PRETRAINED: Final = "config.json"
"""A file that marks a transformers model folder."""


def run_program(module: str, arguments: Sequence[str]) -> int:
    """Runs a program from the ranks' environment; returns its exit code. Raises :class:`ClusterError` without torch."""
    if find_spec("torch") is None:
        trainer = Command.of("docker", "compose", "run", "--rm", "trainer")
        command = trainer.extended(["tridock", module.rpartition(".")[2], *arguments])
        todo = f"run it in the image: {command.render()}, or {install_command('torch')}"
        raise ClusterError(Problem("torch", "is not installed", "", todo))
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


def check_run(run: Path, *, or_pretrained: bool = False) -> None:
    """Raises :class:`RequestError` if ``run`` is not a run's folder or (with ``or_pretrained``) a transformers one."""
    kinds = {EXPERIMENT: "give runs/<run-id>", **({PRETRAINED: "a folder of transformers'"} if or_pretrained else {})}
    if not any((run / file).is_file() for file in kinds):
        what = f"holds no {' and no '.join(kinds)}" if run.is_dir() else "is not here"
        todo = ", or ".join([*kinds.values(), f"for a run of a cluster: --hosts HOSTFILE {shlex.quote(run.name)}"])
        raise RequestError(Problem(str(run), what, "", todo))
