"""Launchers, transports and rank launchers are looked up, never compared by name outside their own rooms."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.sources import SOURCES, nodes
from tridock.cluster.schema import Settings
from tridock.cluster.transports import TRANSPORTS
from tridock.command import Command
from tridock.launchers import LAUNCHERS
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.slurm.ranks import CONTAINERS, MPIRUN, OWN_PROGRAM, RANK_LAUNCHERS
from tridock.launchers.slurm.request import Kind, RankLauncherName

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.xdist_group("sources")
NAMES = {*LAUNCHERS, *RANK_LAUNCHERS, *TRANSPORTS}
HOMES = (
    ROOT / "tridock" / "launchers",
    ROOT / "tridock" / "cluster" / "transports.py",
    ROOT / "tridock" / "node" / "agent" / "processes.py",  # finds DeepSpeed's runner by the name of its program
)


def compared(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that a comparison or a match statement compares with."""
    for node in nodes:
        if isinstance(node, ast.MatchValue):
            operands: list[ast.expr] = [node.value]
        elif isinstance(node, ast.Compare):
            # "local" in fields asks for a key.
            keys = isinstance(node.ops[0], ast.In | ast.NotIn)
            operands = [*([] if keys else [node.left]), *node.comparators]
        else:
            continue
        for operand in operands:
            parts = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            found = (part.value for part in parts if isinstance(part, ast.Constant))
            yield from (name for name in found if isinstance(name, str) and name in NAMES)


def test_no_name_is_compared() -> None:
    paths = [path for path in SOURCES if not any(path.is_relative_to(home) for home in HOMES)]
    assert [(path, name) for path in paths for name in compared(nodes(path))] == []


def test_a_comparison_is_found() -> None:
    text = "a == 'ssh' or b in ('srun', 'x')\nmatch c:\n    case 'compose': pass\n"
    assert sorted(compared(ast.walk(ast.parse(text)))) == ["compose", "srun", "ssh"]


def test_every_name_of_a_schema_has_an_implementation() -> None:
    assert set(get_args(Settings.model_fields["transport"].annotation)) == set(TRANSPORTS)
    assert {*get_args(RankLauncherName), OWN_PROGRAM, MPIRUN} == set(RANK_LAUNCHERS)
    assert set(get_args(Kind)) == set(CONTAINERS)


def test_only_a_scheduler_queues_a_run_again() -> None:
    assert {name: launcher.scheduler for name, launcher in LAUNCHERS.items()} == {
        "ssh": None,
        "slurm": "Slurm",
        "local": None,
    }
    assert Slurm.requeue("17") == Command.of("scontrol", "requeue", "17")
