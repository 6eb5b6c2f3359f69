"""A report for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tridock.ops.doctor.finding import CHECKS, Finding, Report

if TYPE_CHECKING:
    from rich.table import Table

_STYLES: Final = {"ok": "green", "warn": "dark_orange3", "fail": "bold red"}


def table(report: Report) -> Table:
    """One line per check: its result, and what it saw."""
    from rich.table import Column, Table  # a launch checks too, and prints no table
    from rich.text import Text

    cluster = report.session.cluster
    shown = Table("check", "", Column("seen", overflow="fold"), title=f"cluster {cluster.name}", title_justify="left")
    for check in CHECKS:
        found = [finding for finding in report.findings if finding.check == check]
        failed = any(finding.severity == "fail" for finding in found)
        if not found and check not in report.seen:
            if check == "data":
                continue  # nobody named an experiment
            shown.add_row(check, "-", f"not tried: {report.skipped.get(check, 'fix the others first')}")
            continue
        state = "fail" if failed else "warn" if found else "ok"
        where = ", ".join(dict.fromkeys(finding.problem.where for finding in found))
        shown.add_row(check, Text(state, _STYLES[state]), where if failed else report.seen.get(check, where))
    return shown


def lines(report: Report) -> Iterator[str]:
    """Each finding with its reason, then a summary line."""
    for finding in sorted(report.findings, key=lambda it: (it.severity, CHECKS.index(it.check))):
        yield str(finding)
        yield f"      {finding.why}"
    yield f"{verdict(report)} ({report.seconds:.1f} s)"


def verdict(report: Report) -> str:
    """Returns the last line of the report: whether the cluster is fit, and how many checks failed or warned."""
    counts = {kind: sum(it.severity == kind for it in report.findings) for kind in ("fail", "warn")}
    nodes = len(report.session.nodes)
    warnings = "" if not counts["warn"] else f", {_many(counts['warn'], 'warning')}"
    if report.healthy:
        return f"cluster {report.session.cluster.name}: fit, {_many(nodes, 'node')}{warnings}"
    return f"cluster {report.session.cluster.name}: not fit, {_many(counts['fail'], 'failure')}{warnings}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def to_json(report: Report) -> dict[str, object]:
    """Returns the report for ``--json``."""
    return {
        "cluster": report.session.cluster.name,
        "healthy": report.healthy,
        "nodes": list(report.session.nodes),
        "seconds": round(report.seconds, 2),
        "seen": report.seen,
        "all_reduce": report.reduced,
        "findings": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: Finding) -> dict[str, object]:
    problem = finding.problem
    return {
        "severity": finding.severity,
        "check": finding.check,
        "node": problem.where,
        "what": problem.what,
        "got": problem.got,
        "todo": problem.todo,
        "why": finding.why,
        "can_be_mended": bool(finding.remedy),
    }
