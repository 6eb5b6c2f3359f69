"""The evidence of a node about a failed run, and triage's diagnosis from it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.node.conftest import node, wait_until
from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.events import Event, append_event
from tridock.contracts.node_answers import Evidence
from tridock.node.agent import evidence as evidence_
from tridock.node.agent.evidence import last_collectives
from tridock.triage import diagnose, facts_of

MakeRun = Callable[..., Path]


def evidence_of(folder: Path) -> Evidence:
    return decode(Evidence, node("evidence", str(folder)).stdout)


def test_a_node_without_the_run_has_no_evidence(tmp_path: Path) -> None:
    assert evidence_of(tmp_path / "none") == Evidence()


def test_the_ends_of_what_there_is(make_run: MakeRun) -> None:
    folder = make_run("exit 0")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-3.log").write_bytes(b"\xff" + b"".join(b"line %d\n" % number for number in range(2000)))
    (folder / "logs" / "rank-x.log").touch()
    (folder / run_folder.METRICS).write_text('{"iteration": 1, "loss": 2.5}\n{"iteration": 1, "split": "test"}\n{"it')
    (folder / run_folder.PLAN).write_text('{"ranks": [], "memory": {"stages": [], "gpu": null}, "cost": 1}')
    found = evidence_of(folder)
    lines = found.logs[3].splitlines()
    assert (lines[0], lines[-1]) == ("line 1940", "line 1999")
    assert (list(found.logs), found.launcher, found.events) == ([3], "", "")
    assert found.metrics == ({"iteration": 1, "loss": 2.5},)
    assert found.plan == {"ranks": [], "memory": {"stages": [], "gpu": None}}


@pytest.mark.parametrize(
    ("script", "rule", "seen"),
    [
        ("echo 'Address already in use'; exit 3", "address-in-use", "Address already in use (logs/launcher.log)"),
        ("exit 3", "launcher-ended", ""),
    ],
)
def test_a_launcher_that_ends_of_itself(make_run: MakeRun, script: str, rule: str, seen: str) -> None:
    folder = make_run(script)
    assert node("start", str(folder)).returncode == 0
    wait_until((folder / run_folder.EXIT_CODE).exists)
    facts = facts_of({"here": evidence_of(folder)}, "here", 3)
    assert str(facts.failure) == "the launcher ended with exit code 3"
    found = diagnose(facts)
    assert (found.rule, found.seen) == (rule, seen)
    (folder / run_folder.EVENTS).unlink()
    (folder / run_folder.LAUNCHER_LOG).unlink()
    assert diagnose(facts_of({"here": evidence_of(folder)}, "here", 3)).rule == "unknown"


def test_of_a_run_that_was_started_again_the_last_attempt(make_run: MakeRun) -> None:
    folder = make_run("exit 0")
    (folder / "logs").mkdir()
    earlier = "CUDA out of memory\n"
    (folder / run_folder.LAUNCHER_LOG).write_text(f"{earlier}tridock: started again\nEADDRINUSE\n")
    append_event(folder, Event.RUN_RESTARTED, attempt=1, iteration=0, reason="x", log_bytes=len(earlier))
    found = evidence_of(folder)
    assert found.launcher == "tridock: started again\nEADDRINUSE"
    assert diagnose(facts_of({"a": found}, "a", 4)).rule == "address-in-use"


KMSG = (
    b"6,1,1000000,-;Out of memory: Killed process 1 (old) total-vm:1kB\n",
    b"6,2,9000000000000000,-;usb 1-1: new device\n",
    b"3,3,9000000000000001,-;Out of memory: Killed process 77 (python) total-vm:1kB\n SUBSYSTEM=x\n",
)


def test_the_kernels_messages_since_the_run_began(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded device: reading the real one takes a privilege that a container lacks."""
    folder, records = make_run("exit 0"), list(KMSG)
    read = evidence_.os.read

    def record(descriptor: int, size: int) -> bytes:
        if Path(f"/proc/self/fd/{descriptor}").readlink() != kmsg:
            return read(descriptor, size)
        if not records:
            raise BlockingIOError
        return records.pop(0)

    kmsg = folder / "kmsg"
    kmsg.touch()
    monkeypatch.setattr(evidence_, "_KMSG", kmsg)
    monkeypatch.setattr(evidence_.os, "read", record)
    assert evidence_.evidence(folder).kernel == ("Out of memory: Killed process 77 (python) total-vm:1kB",)
    monkeypatch.setattr(evidence_, "_KMSG", folder / "none")
    assert evidence_.evidence(folder).kernel == ()


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("was-here"),)


def test_what_torch_prints_of_a_ranks_exception(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/launcher.log").write_text(
        "[rank0]: of an attempt before\n"
        "host-b: [rank3]: Traceback (most recent call last):\nhost-b: step 4\nhost-b: [rank3]: ValueError: no\n"
        "[rank0]: RuntimeError: Connection closed by peer\n"
    )
    append_event(tmp_path, Event.RUN_RESTARTED, log_bytes=30)
    assert evidence_of(tmp_path).printed == {
        0: "RuntimeError: Connection closed by peer",
        3: "Traceback (most recent call last):\nValueError: no",
    }


def test_flight_records_are_read_as_plain_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of torch's ``_dump_fr_trace``; what a hostile file would run is not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()

    def entry(group: str, number: int) -> dict[str, object]:
        return {"process_group": (group, "default_pg"), "collective_seq_id": number, "state": "scheduled"}

    for rank, entries in enumerate(([entry("0", 7), entry("0", 8), entry("1", 30)], [entry("0", 7)], [])):
        dump = {"version": "2.10", "entries": entries}
        (tmp_path / f"{run_folder.FLIGHT}{rank}").write_bytes(pickle.dumps(dump))
    (tmp_path / f"{run_folder.FLIGHT}3").write_bytes(pickle.dumps({"entries": [Evil()]}))
    (tmp_path / f"{run_folder.FLIGHT}4").write_bytes(pickle.dumps({"entries": [entry("0", 1)]})[:-9])
    assert last_collectives(tmp_path) == {0: 8, 1: 7}
    assert not (tmp_path / "was-here").exists()
