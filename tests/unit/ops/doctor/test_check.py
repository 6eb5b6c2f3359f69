"""Requests to nodes that do not understand them, or do not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.ops.checks.lab import make_cluster, shown
from tests.unit.ops.checks.lab import node_report as full_report
from tridock.command import Command
from tridock.contracts.codec import encode
from tridock.contracts.node_answers import PROTOCOL, HostKey, QuickReport
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, Problem
from tridock.ops.checks.devices import GpuHost
from tridock.ops.checks.quick import node_report
from tridock.ops.doctor import check
from tridock.ops.doctor.check import _reduce, ask_gpu_hosts, ask_nodes
from tridock.ops.doctor.report import Report, table
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.remote import Completed

USAGE = b"python -m tridock.node: error: argument VERB: invalid choice: 'node-report' (choose from 'start', 'follow')\n"


def client(folder: Path, monkeypatch: pytest.MonkeyPatch, done: Completed) -> NodeClient:
    made = NodeClient(Hosts(make_cluster(folder)), {})
    monkeypatch.setattr(made, "node_verb", lambda node, *arguments, stdin, timeout: done)
    return made


def test_an_image_without_torch_is_asked_for_no_all_reduce(tmp_path: Path) -> None:
    made = NodeClient(Hosts(make_cluster(tmp_path)), {})
    report = Report(made.hosts)
    reports = {"host-1": full_report(), "host-2": full_report(no_reduction="no torch in its Python 3.12")}
    _reduce(made, reports, report)  # host-1 would be contacted
    assert (report.findings, report.reduced) == ([], None)
    rows = [cell for column in table(report).columns for cell in column.cells]
    assert "not tried: host-2's image has no torch in its Python 3.12" in rows


@pytest.mark.parametrize(("state", "skipped"), [("running", True), ("done", False)])
def test_beside_a_run_there_is_no_all_reduce(
    state: str, skipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = "t-20260101-000000-abcd"
    monkeypatch.setattr(check, "list_runs", lambda _: [SimpleNamespace(run_id=run_id, state=RunState(state))])
    monkeypatch.setattr(check, "check_hosts", lambda hosts, _: NodeClient(hosts, {}))
    monkeypatch.setattr(check, "check_containers", lambda *_: ("host-1", "host-2"))
    monkeypatch.setattr(check, "node_report", lambda *_: full_report(runs=(run_id,)))
    monkeypatch.setattr(check, "_probe_mesh", lambda *_: None)
    monkeypatch.setattr(check, "_reduce", lambda *_: reduced.append(True))
    reduced: list[bool] = []
    report = check.check(Hosts(make_cluster(tmp_path)))
    assert bool(reduced) is not skipped
    assert report.skipped == ({"all-reduce": f"{run_id} continues there"} if skipped else {})
    assert [one.severity for one in report.findings] == ["warn", "warn"][: 1 + (not skipped)]


def test_an_image_from_before_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = client(tmp_path, monkeypatch, Completed(2, b"", USAGE))
    with pytest.raises(ClusterError) as caught:
        node_report(old, "host-1", QuickReport, "--quick")
    assert str(caught.value) == (
        "host-1: its image has another version of Tridock; got it does not know node-report; "
        f"run tridock image, then tridock up --hosts {tmp_path}/lab"
    )


def report_of(protocol: int) -> QuickReport:
    return QuickReport(protocol=protocol, shm=None, disk=None, unwritable=None, built_for="cpu", cuda_error=None)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ("{}", "another form of answer to node-report"),
        ("no JSON", "another form of answer to node-report"),
        (encode(report_of(PROTOCOL)).replace("disk", "disc"), "another form of answer to node-report"),
        (encode(report_of(PROTOCOL + 1)), f"protocol {PROTOCOL + 1}, {PROTOCOL} here"),
    ],
)
def test_an_image_is_known_by_its_protocol_and_the_form_of_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, got: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        node_report(client(tmp_path, monkeypatch, Completed(0, answer.encode(), b"")), "host-1", QuickReport)
    assert caught.value.problems[0].got == got
    own = client(tmp_path, monkeypatch, Completed(0, encode(report_of(PROTOCOL)).encode(), b""))
    assert node_report(own, "host-1", QuickReport) == report_of(PROTOCOL)


def test_an_answer_is_read_and_a_failure_has_its_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = client(tmp_path, monkeypatch, Completed(0, b'{"fingerprint": "SHA256:x"}', b""))
    assert healthy.ask("host-1", HostKey, "host-key") == HostKey("SHA256:x")
    failing = client(tmp_path, monkeypatch, Completed(1, b"", b"No such file\n", "docker exec ..."))
    with pytest.raises(ClusterError) as caught:
        failing.ask("host-1", HostKey, "node-report")
    assert str(caught.value) == (
        "host-1: `docker exec ...` failed with exit code 1; got No such file; fix that there, then try again"
    )


def test_one_node_that_does_not_answer_leaves_the_others(tmp_path: Path) -> None:
    made = Hosts(make_cluster(tmp_path))
    report = Report(made)

    def ask(node: str, _: Any) -> str:
        if node == "host-2":
            raise ClusterError(
                Problem(node, "did not finish within 20 s", "", "see what delays it there, then try again")
            )
        return "well"

    assert ask_nodes(made, report, made.nodes, ask) == {"host-1": "well"}
    assert shown(report.findings) == [
        "fail  host-2: did not finish within 20 s; see what delays it there, then try again"
    ]


class FakeHost:
    """Answers the doctor's question about GPUs."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.asked = answer, 0

    def run(self, command: Command, *, timeout: float) -> Completed:
        self.asked += 1
        return Completed(0, self.answer, b"")


def test_only_hosts_of_nodes_with_gpus_are_asked_for_them(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path)
    xid = b"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    hosts = {"host-1": FakeHost(xid + b"GPU-aa, 7, python, 9 MiB\n\xff"), "host-2": FakeHost(b"")}
    made = Hosts(cluster, hosts)  # type: ignore[arg-type]
    reports = {"host-1": full_report(built_for="cuda"), "host-2": full_report(built_for="cpu")}
    assert ask_gpu_hosts(made, reports) == {
        "host-1": GpuHost(("Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",), {"GPU-aa": ("7 python, 9 MiB",)})
    }
    assert [host.asked for host in hosts.values()] == [1, 0]
    assert ask_gpu_hosts(made, {"host-2": reports["host-2"]}) == {}
