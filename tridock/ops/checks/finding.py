"""What the doctor finds: a problem of a node, how bad it is, why it matters, and what ``--fix`` would do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tridock.contracts.mesh_answers import MeshAnswer
from tridock.contracts.node_answers import NodeReport
from tridock.errors import Problem

Severity = Literal["fail", "warn"]
Remedy = tuple[str, ...]
"""A fix that is safe without asking: ("up",), ("keys",), ("stop", run id). Empty if a person has to decide."""

Reports = Mapping[str, NodeReport]
"""By node, the head first."""
Mesh = Mapping[str, MeshAnswer]
"""By node, the head first."""

UP: Remedy = ("up",)
KEYS: Remedy = ("keys",)

# The checks, in the order of their lines in the report.
CHECKS = (
    "hosts", "nodes", "ssh", "image", "environment", "clock", "space", "limits", "devices", "network", "data",
    "all-reduce",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: ``problem.where`` is the node, ``problem.todo`` the fix."""

    severity: Severity
    check: str
    problem: Problem
    why: str
    remedy: Remedy = ()

    def __str__(self) -> str:
        return f"{self.severity}  {self.problem}"


def fail(check: str, problem: Problem, why: str, remedy: Remedy = ()) -> Finding:
    """A run would not start, or not end."""
    return Finding("fail", check, problem, why, remedy)


def warn(check: str, problem: Problem, why: str, remedy: Remedy = ()) -> Finding:
    """A run would continue, but slower, or fail later."""
    return Finding("warn", check, problem, why, remedy)
