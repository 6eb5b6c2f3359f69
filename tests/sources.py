"""Tridock's own modules, each parsed once for all tests that read them, which share one of xdist's workers."""

import ast
import functools
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = (ROOT / "fabfile.py", *sorted((ROOT / "tridock").rglob("*.py")))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module, as of :func:`ast.walk`."""
    return tuple(ast.walk(parsed(path)))
