"""What one look at a cluster came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tridock.ops.doctor.finding import Finding
from tridock.ops.hosts.session import Session


@dataclass
class Report:
    """What was found, and what was seen on the way, by check; ``seen`` has a check's line where all is well."""

    session: Session
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    reduced: Mapping[str, Any] | None = None
    seconds: float = 0.0

    @property
    def healthy(self) -> bool:
        """Whether nothing fails; warnings are allowed."""
        return not any(finding.severity == "fail" for finding in self.findings)

    def fails(self, *checks: str) -> bool:
        """Whether one of these checks has failed."""
        return any(finding.severity == "fail" and finding.check in checks for finding in self.findings)
