"""The doctor's report: what its checks found, for people and for programs, and the fixes of ``tridock check --fix``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tridock.errors import TridockError, count
from tridock.ops.checks.finding import CHECKS, KEYS, UP, Finding
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.hosts.keys import keys
from tridock.ops.nodes.containers import up
from tridock.ops.runs import cluster_runs

if TYPE_CHECKING:
    from rich.table import Table

_STYLES: Final = {"ok": "green", "warn": "dark_orange3", "fail": "bold red"}


@dataclass
class Report:
    """The findings of all checks; ``seen`` has one line for each check that was made, shown if it found nothing."""

    hosts: Hosts
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


def table(report: Report) -> Table:
    """One line per check: its result, and what it saw."""
    from rich.table import Column, Table  # a launch checks too, and prints no table
    from rich.text import Text

    cluster = report.hosts.cluster
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
    nodes = len(report.hosts.nodes)
    warnings = "" if not counts["warn"] else f", {count(counts['warn'], 'warning')}"
    if report.healthy:
        return f"cluster {report.hosts.cluster.name}: fit, {count(nodes, 'node')}{warnings}"
    return f"cluster {report.hosts.cluster.name}: not fit, {count(counts['fail'], 'failure')}{warnings}"


def to_json(report: Report) -> dict[str, object]:
    """Returns the report for ``--json``."""
    return {
        "cluster": report.hosts.cluster.name,
        "healthy": report.healthy,
        "nodes": list(report.hosts.nodes),
        "seconds": round(report.seconds, 2),
        "seen": report.seen,
        "all_reduce": report.reduced,
        "findings": [
            {
                "severity": it.severity,
                "check": it.check,
                "node": it.problem.where,
                "what": it.problem.what,
                "got": it.problem.got,
                "todo": it.problem.todo,
                "why": it.why,
                "can_be_mended": bool(it.remedy),
            }
            for it in report.findings
        ],
    }


def apply_fixes(hosts: Hosts, report: Report, say: Callable[[str], object]) -> bool:
    """Applies the remedies of the findings and prints each result; returns whether there were any."""
    wanted = {finding.remedy for finding in report.findings if finding.remedy}

    def end(run_id: str) -> None:
        cluster_runs.stop(NodeClient.of(hosts), cluster_runs.Run(run_id, hosts.head))

    for run_id in sorted(remedy[1] for remedy in wanted if remedy[0] == "stop"):
        _try(say, f"end the leftover processes of run {run_id}", partial(end, run_id))
    if UP in wanted:
        _try(say, "bring the nodes up: keys, image, containers", lambda: up(hosts))
    elif KEYS in wanted:
        _try(say, "give all nodes the cluster's keys again", lambda: keys(hosts))
    return bool(wanted)


def _try(say: Callable[[str], object], what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except TridockError as error:
        say(f"not fixed: {what}")
        for problem in error.problems:
            say(f"    {problem}")
    else:
        say(f"fixed: {what}")
