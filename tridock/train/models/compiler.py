"""What ``torch.compile`` needs on a rank of the CPU: a C++ compiler, and the headers of its Python."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from tridock.errors import Problem

_TODO = "or set it to false"


def compiler_problems(env: Mapping[str, str] = os.environ, headers: Path | None = None) -> Iterator[Problem]:
    """What is missing here. Found out by torch itself it is a trace of its insides, in the middle of the first step."""
    compiler = env.get("CXX", "g++")
    if shutil.which(compiler, path=env.get("PATH", os.defpath)) is None:
        what, todo = "needs a C++ compiler where the ranks are on the CPU", "install g++, name another in CXX, "
        yield Problem("train.compile", what, f"no {compiler} on the PATH", todo + _TODO)
    header = (headers or Path(sysconfig.get_path("include"))) / "Python.h"
    if not header.is_file():
        what, todo = "needs Python's headers where the ranks are on the CPU", "install python3-dev, "
        yield Problem("train.compile", what, f"no {header}", todo + _TODO)
