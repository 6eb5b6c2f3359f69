"""What the doctor finds: a problem of a node, how bad it is, why it matters, and what ``--fix`` would do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tridock.contracts.mesh_answers import MeshAnswer
from tridock.contracts.node_answers import NodeReport
from tridock.errors import Problem
from tridock.ops.hosts.session import Session

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


@dataclass
class Report:
    """The findings of all checks; ``seen`` has one line for each check that was made, shown if it found nothing."""

    session: Session
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a check does not apply here."""
    reduced: Mapping[str, Any] | None = None
    seconds: float = 0.0

    @property
    def healthy(self) -> bool:
        """Whether nothing fails; warnings are allowed."""
        return not self.fails(*CHECKS)

    def fails(self, *checks: str) -> bool:
        """Whether one of these checks has failed."""
        return any(finding.severity == "fail" and finding.check in checks for finding in self.findings)
