"""Questions to nodes that do not understand them, or do not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.doctor.lab import make_cluster, shown
from tridock.errors import ClusterError, Problem
from tridock.ops.doctor.node_client import asked, node_report, verb
from tridock.ops.doctor.report import Report
from tridock.ops.hosts.session import Session
from tridock.remote import Completed

USAGE = b"python -m tridock.node: error: argument VERB: invalid choice: 'node-report' (choose from 'start', 'follow')\n"


def session(folder: Path, monkeypatch: pytest.MonkeyPatch, done: Completed) -> Session:
    made = Session(make_cluster(folder))
    monkeypatch.setattr(made, "node_verb", lambda node, *words, timeout: done)
    return made


def test_an_image_from_before_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = session(tmp_path, monkeypatch, Completed(2, b"", USAGE))
    with pytest.raises(ClusterError) as caught:
        verb(old, "host-1", 1.0, "node-report", "--quick")
    assert str(caught.value) == (
        "host-1: its image is of another version of Tridock; got it does not know node-report; "
        f"run make image, then fab up --hosts {tmp_path}/lab"
    )


@pytest.mark.parametrize(
    ("answer", "got"), [(b"{}", "protocol unknown, 2 here"), (b'{"protocol": 9}', "protocol 9, 2 here")]
)
def test_an_image_is_known_by_its_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, got: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        node_report(session(tmp_path, monkeypatch, Completed(0, answer, b"")), "host-1")
    assert caught.value.problems[0].got == got
    own = session(tmp_path, monkeypatch, Completed(0, b'{"protocol": 2}', b""))
    assert node_report(own, "host-1") == {"protocol": 2}


def test_an_answer_is_read_and_a_failure_has_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    well = session(tmp_path, monkeypatch, Completed(0, b'{"key": "SHA256:x"}', b""))
    assert verb(well, "host-1", 1.0, "host-key") == {"key": "SHA256:x"}
    ill = session(tmp_path, monkeypatch, Completed(1, b"", b"No such file\n", "docker exec ..."))
    with pytest.raises(ClusterError) as caught:
        verb(ill, "host-1", 1.0, "node-report")
    assert str(caught.value) == (
        "host-1: `docker exec ...` failed with exit code 1; got No such file; mend that there, then try again"
    )


def test_one_node_that_does_not_answer_leaves_the_others(tmp_path: Path) -> None:
    made = Session(make_cluster(tmp_path))
    report = Report(made)

    def ask(node: str, _: Any) -> str:
        if node == "host-2":
            raise ClusterError(
                Problem(node, "was given up after 20 s", "", "see what holds it up there, then try again")
            )
        return "well"

    assert asked(made, report, made.nodes, ask) == {"host-1": "well"}
    assert shown(report.findings) == [
        "fail  host-2: was given up after 20 s; see what holds it up there, then try again"
    ]
