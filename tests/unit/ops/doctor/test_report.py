"""The report as people and programs read it, and what --fix says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.ops.checks.lab import make_cluster
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.checks.finding import KEYS, UP, fail, warn
from tridock.ops.doctor import report as remedies
from tridock.ops.doctor.report import Report, apply_fixes, lines, table, to_json
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs import cluster_runs

DOWN = Problem("host-2", "its node is not running", "exited with 137", "run tridock up --hosts lab")
LITTLE = Problem("host-1", "has little disk space for checkpoints", "5.0 GB free", "free some space there")


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    made = Report(Hosts(make_cluster(tmp_path)), seconds=1.234)
    monkeypatch.setattr(NodeClient, "of", lambda hosts: NodeClient(hosts, {}))
    made.seen |= {"hosts": "2 of 2 answer", "nodes": "1 run", "space": "at least 5.0 GB"}
    return made


def rows(report: Report) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=120).print(table(report))
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in out.getvalue().splitlines() if "│" in line
    ]


def test_a_line_for_each_check(report: Report) -> None:
    report.findings += [warn("space", LITTLE, "logs go there"), fail("nodes", DOWN, "ranks start there", UP)]
    shown = {row[0]: row[1:] for row in rows(report)}
    assert shown["hosts"] == ["ok", "2 of 2 answer"]
    assert shown["nodes"] == ["fail", "host-2"]
    assert shown["space"] == ["warn", "at least 5.0 GB"]
    assert shown["all-reduce"] == ["-", "not tried: fix the others first"]
    assert "data" not in shown


def test_each_finding_with_its_reason_failures_first(report: Report) -> None:
    report.findings += [warn("space", LITTLE, "logs go there"), fail("nodes", DOWN, "ranks start there", UP)]
    assert list(lines(report)) == [
        "fail  host-2: its node is not running; got exited with 137; run tridock up --hosts lab",
        "      ranks start there",
        "warn  host-1: has little disk space for checkpoints; got 5.0 GB free; free some space there",
        "      logs go there",
        "cluster lab: not fit, 1 failure, 1 warning (1.2 s)",
    ]


def test_warnings_alone_leave_a_cluster_fit(report: Report) -> None:
    assert report.healthy
    assert list(lines(report)) == ["cluster lab: fit, 2 nodes (1.2 s)"]
    report.findings += [warn("space", LITTLE, "logs go there")] * 2
    assert report.healthy
    assert list(lines(report))[-1] == "cluster lab: fit, 2 nodes, 2 warnings (1.2 s)"


def test_for_programs(report: Report) -> None:
    report.findings.append(fail("nodes", DOWN, "ranks start there", UP))
    assert to_json(report) == {
        "cluster": "lab",
        "healthy": False,
        "nodes": ["host-1", "host-2"],
        "seconds": 1.23,
        "seen": {"hosts": "2 of 2 answer", "nodes": "1 run", "space": "at least 5.0 GB"},
        "all_reduce": None,
        "findings": [
            {
                "severity": "fail", "check": "nodes", "node": "host-2", "what": "its node is not running",
                "got": "exited with 137", "todo": "run tridock up --hosts lab", "why": "ranks start there",
                "can_be_mended": True,
            }
        ],
    }  # fmt: skip


def test_what_is_asked_for_is_mended_and_refusals_are_said(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []

    def up(hosts: Hosts) -> str:
        todo = "stop the run first: tridock stop"
        raise RequestError(
            Problem("host-2", "its node would be replaced by tridock up while a run is active", "r", todo)
        )

    monkeypatch.setattr(remedies, "up", up)
    monkeypatch.setattr(remedies, "keys", lambda hosts: did.append("keys"))
    monkeypatch.setattr(cluster_runs, "stop", lambda client, run: did.append(run.run_id))
    said: list[str] = []
    assert not apply_fixes(report.hosts, report, said.append)
    report.findings += [fail("ssh", DOWN, "", KEYS), warn("devices", DOWN, "", ("stop", "r-1"))]
    assert apply_fixes(report.hosts, report, said.append)
    assert (did, said) == (
        ["r-1", "keys"],
        ["fixed: end the leftover processes of run r-1", "fixed: give all nodes the cluster's keys again"],
    )
    report.findings.append(fail("nodes", DOWN, "", UP))  # which gives the keys, too
    del did[:], said[:]
    assert apply_fixes(report.hosts, report, said.append)
    assert (did, said) == (
        ["r-1"],
        [
            "fixed: end the leftover processes of run r-1",
            "not fixed: bring the nodes up: keys, image, containers",
            "    host-2: its node would be replaced by tridock up while a run is active; got r; "
            "stop the run first: tridock stop",
        ],
    )


def test_what_cannot_be_mended_stops_nothing_else(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(client: NodeClient, run: cluster_runs.Run) -> dict[str, int]:
        raise ClusterError(Problem("host-1", "is away", "", "wait"))

    did: list[str] = []
    monkeypatch.setattr(cluster_runs, "stop", stop)
    monkeypatch.setattr(remedies, "keys", lambda hosts: did.append("keys"))
    report.findings += [warn("devices", DOWN, "", ("stop", "r-1")), fail("ssh", DOWN, "", KEYS)]
    assert apply_fixes(report.hosts, report, lambda _: None)
    assert did == ["keys"]
