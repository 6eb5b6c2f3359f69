"""A script of a run on all of its nodes: here each node is a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts.supervision import Reach, Supervision
from tridock.node.agent.evidence import evidence
from tridock.triage import diagnose, facts_of

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run_scripts(*scripts: str) -> subprocess.CompletedProcess[str]:
        ranks = {f"node-{number}": (number,) for number in range(len(scripts))}
        reach = Reach(("sh", "-c"), as_one_argument=True)
        supervision = Supervision("node-0", ranks, tuple(ranks)[1:], 20000, 30.0, reach=reach, observed=True)
        (tmp_path / "supervision.json").write_text(supervision.to_json())
        for number, script in enumerate(scripts):
            (tmp_path / f"part-{number}.sh").write_text(script)
        argv = [sys.executable, "-m", "tridock.node", "start-nodes", str(tmp_path), "part-{node_rank}.sh"]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=STEP_S)

    return run_scripts


LATER = "until grep -qs node_failed events.jsonl; do sleep 0.05; done"
"""A node's script waits here until another node's failure is recorded."""


def test_every_line_has_its_node(run: Run) -> None:
    done = run("echo one; echo two >&2", "printf 'three'")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["node-0: one", "node-0: two", "node-1: three"]


def test_one_node_needs_no_name(run: Run) -> None:
    assert run("echo one").stdout == "one\n"


def test_a_progress_bar_comes_in_short_lines(run: Run) -> None:
    done = run("for i in $(seq 999); do printf '\\r%3d%%|#####|' $i; done; echo", "printf 'two\\r\\n'")
    first = [line for line in done.stdout.splitlines() if line.startswith("node-0: ")]
    assert "node-1: two\n" in done.stdout
    assert first[-1] == "node-0: 999%|#####|"
    assert max(map(len, first)) < 30


def test_the_first_failure_decides_and_the_others_may_still_speak(run: Run) -> None:
    done = run(f"{LATER}; echo late; exit 5", "exit 4")
    assert done.returncode == 4
    assert done.stdout == "node-0: late\n"
    assert done.stderr == (
        "tridock: part-1.sh ended with exit code 4 on node-1\ntridock: part-0.sh ended with exit code 5 on node-0\n"
    )


def test_a_node_that_continues_is_left_to_the_supervisor(run: Run) -> None:
    done = run("exec sleep 5", "kill -9 $$")
    assert (done.returncode, done.stderr) == (137, "tridock: part-1.sh ended with exit code 137 on node-1\n")


def test_a_lost_session_is_no_failure_of_its_node(run: Run) -> None:
    """ssh's own exit code: what it started may still run, and so do the other nodes."""
    done = run("sleep 3.2; echo late", "exit 255")
    assert (done.returncode, done.stdout) == (255, "node-0: late\n")
    assert done.stderr == "tridock: part-1.sh ended with exit code 255 on node-1\n"
    assert run("sleep 0.2; exit 4", "exit 255").returncode == 4


def test_a_setup_that_fails_is_explained_by_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "supervision.json").write_text(Supervision("a", {"a": (0,)}, (), 20000, 30.0, observed=True).to_json())
    (tmp_path / "setup.sh").write_text("echo ERROR: no such package; echo; exit 1")
    argv = [sys.executable, "-m", "tridock.node", "start-nodes", str(tmp_path), "setup.sh"]
    assert subprocess.run(argv, capture_output=True, check=False, timeout=STEP_S).returncode == 1
    assert explained(tmp_path) == (
        "setup-failed",
        "a could not be set up: it ended with exit code 1: ERROR: no such package",
    )


def test_a_program_that_fails_is_explained_by_the_first_node_that_failed(run: Run, tmp_path: Path) -> None:
    assert run(f"{LATER}; exit 5", "echo ERROR: no such file; exit 4").returncode == 4
    assert explained(tmp_path) == (
        "node-program-failed",
        "node-1 failed: its program ended with exit code 4: ERROR: no such file",
    )


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tridock.node", "on-devices", "0", "no-such-program"]
    env = {**os.environ, "TRIDOCK_RUN_FOLDER": str(tmp_path), "TRIDOCK_NODE": "a"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=STEP_S, env=env)
    assert done.returncode == 2
    assert explained(tmp_path) == (
        "program-not-started",
        "a cannot start no-such-program: No such file or directory",
    )


def explained(folder: Path) -> tuple[str, str]:
    """The rule that triage finds, and what it says of the failure."""
    facts = facts_of({"a": evidence(folder)}, "a", 1)
    assert not facts.has_log
    return diagnose(facts).rule, str(facts.failure)
