"""The prerequisites of ``torch.compile``: without them torch fails with a traceback in the middle of the first step."""

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tridock.errors import Problem


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
    """Yields what this machine lacks for ranks on ``cpu`` or ``cuda``: a compiler, Python's headers."""
    kind, variable, usual, where = _COMPILERS[device_type]
    names = (env[variable],) if variable in env else usual
    if not any(shutil.which(name, path=env.get("PATH", os.defpath)) for name in names):
        got, todo = f"no {' or '.join(names)} on the PATH", f"install {usual[0]}, name another in {variable}, {_TODO}"
        yield Problem("train.compile", f"needs {kind} where the ranks are {where}", got, todo)
    header = (headers or Path(sysconfig.get_path("include"))) / "Python.h"
    if not header.is_file():
        what, todo = f"needs Python's headers where the ranks are {where}", f"install python3-dev, {_TODO}"
        yield Problem("train.compile", what, f"no {header}", todo)
