"""The queue with real supervisors: five runs on one node, two of which share no slot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import QueuedRun
from tridock.contracts.run_state import LOCK, RunState, state_of
from tridock.contracts.supervision import Supervision
from tridock.node.agent.processes import stop_processes

ROOT = Path(__file__).parents[3]
# Processes are found by their run's id, on the whole machine: those of another pytest must not have the same.
NAMES = [f"{letter}-20261123-{os.getpid() % 10**6:06}-000{number}" for number, letter in enumerate("abcde", start=1)]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "runs").mkdir()
    yield tmp_path
    while found := supervisors(tmp_path):  # one that ends may start the next
        for pid in found:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
    for name in NAMES:
        stop_processes(name, grace_s=0.0)


def make(workspace: Path, name: str, slots: Mapping[str, Sequence[int]], port: int = 20000) -> Path:
    """A run that notes its start, and ends once the workspace has a file with its letter."""
    folder = workspace / "runs" / name
    (folder / "logs").mkdir(parents=True)
    ranks = [{"rank": 0, "node": node, "slot": slot} for node, numbers in slots.items() for slot in numbers]
    (folder / "plan.json").write_text(json.dumps({"ranks": ranks}))
    (folder / "experiment.yaml").write_text("name: x\n")
    supervision = Supervision("localhost", {"localhost": (0,)}, (), port, 0.0, observed=True)
    (folder / "supervision.json").write_text(supervision.to_json())
    (folder / "launch.sh").write_text(
        f"echo {name[0]} >>{workspace}/order\n"
        f"until test -e {workspace}/{name[0]} -o -e {workspace}/go; do sleep 0.05; done\n"
    )
    return folder


def enqueue(run: Path) -> QueuedRun:
    """As the caller reads the answer."""
    return decode(QueuedRun, node("enqueue", run).stdout)


def node(*argv: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tridock.node", *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRIDOCK_NODE": "n", "PYTHONPATH": str(ROOT)},
        input=given,
    )


def supervisors(workspace: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            if b"tridock.node\0start\0" in line and str(workspace).encode() in line:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def queued(workspace: Path) -> list[str]:
    return [run["run_id"][0] for run in json.loads(node("queue", "--workspace", workspace).stdout)]


def order(workspace: Path) -> str:
    path = workspace / "order"
    return path.read_text().replace("\n", "") if path.exists() else ""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STEP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_five_runs_one_after_another_and_one_beside_them_also_where_a_supervisor_is_killed(workspace: Path) -> None:
    runs = [make(workspace, name, {"n": [0, 1]} if name[0] != "d" else {"n": [2]}) for name in NAMES]
    first = enqueue(runs[0])
    assert (first.started, first.node, first.waits_for) == (True, "n", ())
    for run, waits in zip(runs[1:3], ((NAMES[0],), tuple(NAMES[:2])), strict=True):
        answer = enqueue(run)
        assert (answer.started, answer.node, answer.waits_for) == (False, "n", waits)
    (runs[3] / "supervision.json").write_text((runs[3] / "supervision.json").read_text().replace("20000", "20001"))
    assert enqueue(runs[3]).started  # its slots are nobody's
    enqueue(runs[4])
    assert queued(workspace) == ["b", "c", "e"]
    wait_until(lambda: len(order(workspace)) == 2)
    assert sorted(order(workspace)) == ["a", "d"]

    (workspace / "a").touch()
    wait_until(lambda: order(workspace).endswith("b"))
    assert (runs[0] / "exit_code").read_text() == "0\n"
    assert queued(workspace) == ["c", "e"]
    # Nobody reports that this one has ended: the next starts with whoever looks.
    for pid in supervisors(workspace):
        with suppress(ProcessLookupError):  # that of the first, which has started this one
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state_of(runs[1]) is RunState.LOST)
    assert queued(workspace) == ["e"]
    wait_until(lambda: order(workspace).endswith("c"))
    (workspace / "go").touch()
    wait_until(lambda: (runs[4] / "exit_code").exists())
    assert order(workspace) in ("adbce", "dabce")
    assert queued(workspace) == []
    # The supervisor that started the next holds nothing of its own run any more.
    wait_until(lambda: not supervisors(workspace))


def test_a_run_is_removed_and_the_one_behind_it_moves_up(workspace: Path) -> None:
    runs = [make(workspace, name, {"n": [0]}) for name in NAMES[:3]]
    for run in runs:
        assert node("enqueue", run).returncode == 0
    assert node("cancel", runs[1]).returncode == 0
    assert queued(workspace) == ["c"]
    assert state_of(runs[1]) is RunState.STOPPED
    refused = node("cancel", runs[0])
    assert (refused.returncode, refused.stderr) == (2, f"{NAMES[0]}: is running; stop it: tridock stop\n")
    refused = node("cancel", runs[1])
    assert (refused.returncode, refused.stderr) == (2, f"{NAMES[1]}: does not wait; see tridock status\n")
    (workspace / "a").touch()
    wait_until(lambda: order(workspace) == "ac")


def test_the_secrets_of_a_run_that_never_starts_go_with_it(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workspace / "home"))
    runs = [make(workspace, name, {"n": [0]}) for name in NAMES[:3]]
    for run in runs:
        assert node("enqueue", run, "--secrets", given='{"A": "hunter2"}').returncode == 0
    kept = workspace / "home" / ".tridock" / "secrets"
    assert sorted(path.stem for path in kept.iterdir()) == NAMES[:3]
    node("cancel", runs[1])
    (runs[2] / "launch.sh").unlink()
    (workspace / "a").touch()
    wait_until(lambda: (runs[2] / "exit_code").exists())
    assert not (kept / f"{NAMES[1]}.json").exists()
    assert not (kept / f"{NAMES[2]}.json").exists()
    wait_until(lambda: not supervisors(workspace))
    assert not any(b"hunter2" in path.read_bytes() for path in (workspace / "runs").rglob("*") if path.is_file())


def test_one_that_cannot_start_does_not_hold_up_the_others(workspace: Path) -> None:
    runs = [make(workspace, name, {"n": [0]}) for name in NAMES[:3]]
    for run in runs:
        node("enqueue", run)
    (runs[1] / "launch.sh").unlink()
    (workspace / "a").touch()
    wait_until(lambda: order(workspace) == "ac")
    assert (state_of(runs[1]), (runs[1] / "exit_code").read_text()) == (RunState.FAILED, "2\n")
    assert "holds no launch.sh" in (runs[1] / "events.jsonl").read_text()


def test_a_later_run_does_not_overtake_one_that_waits_for_the_same_slot(workspace: Path) -> None:
    wide = make(workspace, NAMES[1], {"n": [0, 1]})
    runs = [make(workspace, NAMES[0], {"n": [0]}), wide, make(workspace, NAMES[2], {"n": [1]})]
    answers = [enqueue(run) for run in runs]
    assert [it.started for it in answers] == [True, False, False]
    assert answers[2].waits_for == (NAMES[1],)


def test_a_run_of_another_head_is_left_to_it(workspace: Path) -> None:
    run = make(workspace, NAMES[0], {"n": [0]})
    node("enqueue", make(workspace, NAMES[1], {"n": [0]}))
    node("enqueue", run)
    ticket = next((workspace / "runs" / ".queue").glob("*.json"))
    ticket.write_text(ticket.read_text().replace('"node": "n"', '"node": "other"'))
    (workspace / "b").touch()
    wait_until(lambda: (workspace / "runs" / NAMES[1] / "exit_code").exists())
    assert queued(workspace) == ["a"]
    assert not (run / LOCK).exists()
