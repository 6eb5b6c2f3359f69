"""Nobody outside tridock/engines/ compares an engine's name: an engine is asked."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.sources import SOURCES, nodes
from tridock.engines import ENGINES
from tridock.experiment.schema import DEFAULT_STRATEGY, Engine

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.xdist_group("sources")
HOME = ROOT / "tridock" / "engines"
MODULE_NAMES = {
    ROOT / "tridock" / "train" / "checkpoints" / "pickles.py",
    ROOT / "tridock" / "node" / "probes" / "torch_files.py",
}
"""Compare names of Python modules, of which torch is one."""


def named(node: ast.AST) -> bool:
    """Whether an expression is an engine's name, or a literal collection that holds one."""
    if isinstance(node, ast.Constant):
        return node.value in ENGINES
    return isinstance(node, ast.Tuple | ast.List | ast.Set) and any(map(named, node.elts))


def comparisons(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines that compare something with an engine's name."""
    for node in nodes:
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        if any(map(named, sides)):
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        'x.engine == "torch"',
        '"megatron-core" != name',
        'x.engine in ("torch", "megatron-core")',
        'engine not in {"megatron-deepspeed"}',
        'match x.engine:\n    case "torch" | "other":\n        pass',
    ],
)
def test_a_comparison_is_seen(source: str) -> None:
    assert list(comparisons(ast.walk(ast.parse(source))))


def test_only_the_engines_compare_engine_names() -> None:
    paths = [path for path in SOURCES if HOME not in path.parents and path not in MODULE_NAMES]
    assert len(paths) > 200
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in comparisons(nodes(path))]
    assert found == []


def test_every_engine_of_the_schema_is_there() -> None:
    assert set(ENGINES) == set(get_args(Engine)) == set(DEFAULT_STRATEGY)


def engine_modules(path: Path) -> set[Path]:
    """The modules of engines that a module imports, directly or through another of them."""
    names = {node.module for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.module}
    names |= {
        f"{node.module}.{one.name}" for node in nodes(path) if isinstance(node, ast.ImportFrom) for one in node.names
    }
    found = {
        file for name in names if HOME in (file := ROOT / f"{name.replace('.', '/')}.py").parents and file.exists()
    }
    return found.union(*(engine_modules(file) for file in found))


@pytest.mark.parametrize("path", [*HOME.rglob("rules.py"), *HOME.rglob("cost_model.py")], ids=str)
def test_rules_and_cost_models_know_no_program(path: Path) -> None:
    found = {file.stem for file in engine_modules(path)}
    assert "fields" in found
    assert not found & {"program", "arguments", "checkpoint_layout"}
