"""The verbs of ``python -m tridock.node`` that are functions of other modules."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts.run_folder import new_run_id
from tridock.node import __main__ as command
from tridock.node.agent.processes import find_processes, stop_processes

CALLED = sorted(set(re.findall(r'calls="(\S+?)"', Path(command.__file__).read_text())))


@pytest.mark.parametrize("path", CALLED)
def test_its_function_exists(path: str) -> None:
    import importlib

    module, name = path.split(":")
    assert callable(getattr(importlib.import_module(f"tridock.node.{module}"), name))


def verb(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | env
    return subprocess.run([sys.executable, "-m", "tridock.node", *argv], env=own, capture_output=True, text=True)


def test_their_options_are_what_the_functions_take(tmp_path: Path) -> None:
    assert json.loads(verb("evidence", str(tmp_path / "none")).stdout)["events"] == ""
    assert json.loads(verb("run-update", str(tmp_path), "--events", "1").stdout)["event_count"] == 0
    assert verb("start-next", "--workspace", str(tmp_path)).returncode == 0
    assert "does not wait" in verb("cancel", str(tmp_path / "runs/a-20260101-000000-0000")).stderr
    report = verb("node-report", "--quick", "--workspace", str(tmp_path), DS_ACCELERATOR="cpu")
    assert json.loads(report.stdout)["built_for"] == "cpu"
    assert "manifest.json" in verb("spare-status", str(tmp_path), "--reserve").stderr


def test_preflight_takes_the_variables_of_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt2.py").touch()
    needs = ("preflight", "--needs", "megatron-source")
    assert json.loads(verb(*needs, "--rank-env", f"TRIDOCK_MEGATRON={tmp_path}").stdout)["lacks"] == []
    assert json.loads(verb(*needs, "--rank-env", f"TRIDOCK_MEGATRON={tmp_path}/no").stdout)["lacks"] != []


@pytest.mark.parametrize("daemon", ["sleep 9999", "sh -c 'while echo started; do sleep 0.3; done'"])
def test_a_program_has_ended_when_it_has_whatever_holds_its_output(daemon: str) -> None:
    run_id = new_run_id("daemon")
    done = verb("on-devices", "0", "sh", "-c", f"{daemon} & echo started; exit 3", TRIDOCK_RUN_ID=run_id)
    stop_processes(run_id, 0.0)
    *printed, last = done.stdout.splitlines()
    assert (done.returncode, set(printed)) == (3, {"started"})
    name = daemon.split()[0]
    assert re.fullmatch(rf"tridock: the program has ended and left {name} \(pid \d+\): ended with the run", last)
    assert find_processes(run_id) == []


def test_a_program_ends_as_it_ended_and_signals_are_not_for_the_one_that_started_it() -> None:
    assert verb("on-devices", "0", "sh", "-c", "kill -9 $$").returncode == 137
    done = verb("on-devices", "0", "sh", "-c", "kill -TERM $PPID; sleep 0.2; echo still running >&2")
    assert (done.returncode, done.stdout) == (0, "still running\n")


def test_a_program_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    script = f"echo 1; sleep 0.5; echo 2; sleep 0.5; echo done >{tmp_path}/done; exit 3"
    argv = [sys.executable, "-m", "tridock.node", "on-devices", "0", "sh", "-c", script]
    env = {**os.environ, "TRIDOCK_RUN_FOLDER": str(tmp_path)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    process.stdout.close()
    assert process.wait(STEP_S) == 3
    assert (tmp_path / "done").exists()
    assert not (tmp_path / "events.jsonl").exists()
