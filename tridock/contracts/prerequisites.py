"""What ranks need on a node besides Python packages: looked for before they start, and by the ranks again."""

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tridock.contracts import environment
from tridock.contracts.run_folder import MEGATRON
from tridock.errors import Problem, RequestError

COMPILER: Final = "compiler"
MEGATRON_SOURCE: Final = "megatron-source"
NEEDS: Final = (COMPILER, MEGATRON_SOURCE)
VARIABLES: Final = ("PATH", "CC", "CXX", "DS_ACCELERATOR", environment.MEGATRON)
"""The variables of an experiment that say where these are."""


class _Compiler(NamedTuple):
    kind: str
    variable: str
    names: tuple[str, ...]
    where: str


_COMPILERS: Final = {
    "cpu": _Compiler("a C++ compiler", "CXX", ("g++",), "on the CPU"),
    "cuda": _Compiler("a C compiler", "CC", ("gcc", "clang"), "on GPUs"),  # Triton's launchers
}
_TODO: Final = "or set it to false"


def compiler_problems(
    device_type: str, env: Mapping[str, str] = os.environ, headers: Path | None = None
) -> Iterator[Problem]:
    """Yields what this machine lacks for ``torch.compile`` on ``cpu`` or ``cuda``: a compiler, Python's headers.

    Without them torch fails with a traceback in the middle of the first step.
    """
    kind, variable, usual, where = _COMPILERS[device_type]
    names = (env[variable],) if variable in env else usual
    if not any(shutil.which(name, path=env.get("PATH", os.defpath)) for name in names):
        got, todo = f"no {' or '.join(names)} on the PATH", f"install {usual[0]}, name another in {variable}, {_TODO}"
        yield Problem("train.compile", f"needs {kind} where the ranks are {where}", got, todo)
    header = (headers or Path(sysconfig.get_path("include"))) / "Python.h"
    if not header.is_file():
        what, todo = f"needs Python's headers where the ranks are {where}", f"install python3-dev, {_TODO}"
        yield Problem("train.compile", what, f"no {header}", todo)


def megatron_source(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of Megatron-LM v1.1.5. Raises :class:`RequestError` if it is missing."""
    folder = Path(env.get(environment.MEGATRON) or MEGATRON)
    if not (folder / "pretrain_gpt2.py").is_file():
        todo = "build the image with its source (tridock image --megatron WHERE), or name its folder in "
        todo += environment.MEGATRON
        raise RequestError(Problem("engine", "Megatron-LM v1.1.5 is not installed", str(folder), todo))
    return folder
