"""What the doctor finds: a problem of a node, how bad it is, why it matters, and what ``--fix`` would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tridock.errors import Problem

Severity = Literal["fail", "warn"]
Remedy = tuple[str, ...]
"""What may be done without asking: ("up",), ("keys",), ("stop", run id). Empty where a person has to see to it."""

Answer = Mapping[str, Any]
Answers = Mapping[str, Answer]
"""What the nodes said, by name, the head first."""

UP: Remedy = ("up",)
KEYS: Remedy = ("keys",)

# The checks, in the order of their lines in the report.
CHECKS = (
    "hosts", "nodes", "ssh", "image", "environment", "clock", "space", "limits", "devices", "network", "data",
    "all-reduce",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be; ``problem.where`` is the node, ``problem.todo`` the one fix."""

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
    """A run would go on, but slower, or into trouble later."""
    return Finding("warn", check, problem, why, remedy)
