"""A run's processes: found by its marker wherever they went, ended without touching any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STEP_S
from tests.unit.node.conftest import answer, node, wait_until
from tridock.contracts import environment, run_folder
from tridock.contracts.node_answers import Stopped
from tridock.contracts.run_state import exit_code_of
from tridock.node.agent.processes import find_processes, find_runs, is_deepspeed_runner

MakeRun = Callable[..., Path]


def counts(folder: Path) -> int:
    return len(find_processes(folder.name))


def start(folder: Path) -> None:
    assert node("start", str(folder)).returncode == 0


def stop(folder: Path, *arguments: str) -> Any:
    return answer("stop", folder.name, "--workspace", str(folder.parents[1]), *arguments)


def test_processes_are_described(make_run: MakeRun) -> None:
    folder = make_run("exec sleep 9961")
    start(folder)
    wait_until(lambda: any("sleep" in process.command for process in find_processes(folder.name)))
    (process,) = find_processes(folder.name)
    assert process.command == ("sleep", "9961")
    assert process.run_id == folder.name
    assert process.ppid > 1
    assert Path("/proc", str(process.pid)).exists()
    assert 0 <= process.cpu_s < 1
    assert 0 <= process.age_s < STEP_S
    assert process.pid in [it.pid for it in find_processes()]
    assert folder.name in find_runs()  # by its supervisor, too


def test_a_process_that_names_no_run_is_not_reported() -> None:
    """A program may set the marker as it likes; an answer with it would be refused as a whole."""
    env = {**os.environ, environment.RUN_ID: "../../../data"}
    with subprocess.Popen(["sleep", "9963"], env=env) as other:
        try:
            wait_until(lambda: [it.pid for it in find_processes("../../../data")] == [other.pid])
            assert other.pid not in [process.pid for process in find_processes()]
            assert not any("data" in run_id for run_id in find_runs())
        finally:
            other.kill()


def test_stopping_one_of_two_runs_leaves_the_other_alone(make_run: MakeRun) -> None:
    first, second = make_run("sleep 9962 & sleep 9962 & wait", "a"), make_run("sleep 9962 & wait", "b")
    unmarked = subprocess.Popen(["sleep", "9962"])
    start(first)
    start(second)
    wait_until(lambda: (counts(first), counts(second)) == (3, 2))
    # A shell whose child was ended may leave before it is asked itself.
    assert stop(first) in [{"stopped": number, "remaining": 0} for number in (1, 2, 3)]
    assert (counts(first), counts(second)) == (0, 2)
    assert unmarked.poll() is None
    assert (exit_code_of(first), exit_code_of(second)) == (143, None)
    assert stop(second) in [{"stopped": number, "remaining": 0} for number in (1, 2)]
    assert stop(second) == {"stopped": 0, "remaining": 0}
    unmarked.kill()
    unmarked.wait()


def test_orphans_in_sessions_of_their_own_are_found(make_run: MakeRun) -> None:
    """Without a supervisor, who would have ended them."""
    folder = make_run("setsid nohup sleep 9963 >/dev/null 2>&1 & exit 3")
    env = {**os.environ, environment.RUN_ID: folder.name}
    assert subprocess.run(["bash", str(folder / run_folder.LAUNCH_SCRIPT)], env=env, check=False).returncode == 3
    wait_until(lambda: counts(folder) == 1)  # one in the middle of its exec has no environment to be found by
    run_folder.write_atomic(folder / run_folder.EXIT_CODE, b"3\n")
    assert stop(folder) == {"stopped": 1, "remaining": 0}
    # The run had ended before: its exit code stays the truth.
    assert exit_code_of(folder) == 3


def test_orphans_of_a_launcher_that_has_ended_go_with_it(make_run: MakeRun) -> None:
    folder = make_run("setsid nohup sleep 9963 >/dev/null 2>&1 & exit 3")
    start(folder)
    assert node("follow", str(folder)).returncode == 3
    assert counts(folder) == 0


def test_what_ignores_sigterm_gets_the_grace_and_then_sigkill(make_run: MakeRun) -> None:
    folder = make_run("trap '' TERM; echo ready; while :; do sleep 0.05; done")
    start(folder)
    wait_until(lambda: b"ready" in (folder / run_folder.LAUNCHER_LOG).read_bytes())
    begin = time.monotonic()
    done = stop(folder, "--grace", "1")
    assert time.monotonic() - begin >= 1.0
    assert done["remaining"] == 0
    assert exit_code_of(folder) == 143


def test_what_ends_at_sigterm_is_not_kept_waiting(make_run: MakeRun) -> None:
    folder = make_run("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    start(folder)
    wait_until(lambda: b"ready" in (folder / run_folder.LAUNCHER_LOG).read_bytes())
    stop(folder, "--grace", "9999")
    assert (folder / run_folder.LAUNCHER_LOG).read_text().endswith("saved\n")


def test_children_that_are_forked_meanwhile_are_found(make_run: MakeRun) -> None:
    # Each generation forks the next one and ends: a list taken once would always be out of date.
    folder = make_run("f() { sleep 0.2; [ \"$1\" -eq 0 ] || f $(($1 - 1)) & }; trap '' TERM; f 10000; wait")
    start(folder)
    wait_until(lambda: counts(folder) > 0)
    time.sleep(0.3)  # so that some have come and gone
    stop(folder, "--grace", "0.3")
    time.sleep(0.3)
    assert counts(folder) == 0


def test_deepspeed_runner_is_never_asked_politely(make_run: MakeRun, tmp_path: Path) -> None:
    """It answers SIGINT and SIGTERM with a pkill on every node, of every run's ranks."""
    runner = tmp_path / "bin" / "deepspeed"
    runner.parent.mkdir()
    runner.write_text(
        "import signal, sys, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda *_: print('PKILL', flush=True))\n"
        "print('ready', flush=True)\n"
        "time.sleep(9964)\n"
    )
    folder = make_run(f"exec '{sys.executable}' '{runner}' --hostfile x")
    start(folder)
    log = folder / run_folder.LAUNCHER_LOG
    wait_until(lambda: b"ready" in log.read_bytes())
    assert stop(folder, "--grace", "9999") == {"stopped": 1, "remaining": 0}
    assert log.read_text() == "ready\n"
    assert exit_code_of(folder) == 143


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "/opt/venv/bin/deepspeed", "--x"],
        ["/opt/venv/bin/ds"],
        ["python3", "-u", "-m", "deepspeed.launcher.runner"],
    ],
)
def test_deepspeeds_runner_is_known_by_its_argv(argv: list[str]) -> None:
    assert is_deepspeed_runner(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x"],
        ["python", "-m", "tridock.train", "deepspeed"],
        ["pdsh", "-w", "a", "deepspeed"],
    ],
)
def test_other_processes_are_not_deepspeeds_runner(argv: list[str]) -> None:
    assert not is_deepspeed_runner(argv)


@pytest.mark.parametrize("run_id", ["", "x", "../../etc", "a-20260101-000000-0000\n", "$(id)-20260101-000000-0000"])
def test_ids_of_the_wrong_form_are_refused(run_id: str) -> None:
    done = node("stop", run_id)
    assert done.returncode == 2
    assert done.stderr == f"run id: has the wrong form; got {run_id!r}; see tridock status for the runs\n"


def test_a_run_that_is_not_here(workspace: Path) -> None:
    run_id = run_folder.new_run_id("elsewhere")
    assert answer("stop", run_id, "--workspace", str(workspace)) == {"stopped": 0, "remaining": 0}
    assert find_processes(run_id) == []


def test_the_one_who_asks_is_not_stopped(make_run: MakeRun) -> None:
    # With another workspace: it would wait for its own supervisor, which waits for it.
    folder = make_run(f"exec '{sys.executable}' -m tridock.node stop $TRIDOCK_RUN_ID --workspace /nonexistent")
    start(folder)
    followed = node("follow", str(folder))
    assert followed.stdout.splitlines()[0] == '{"stopped": 0, "remaining": 0}'


def test_one_that_cannot_be_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from tridock.errors import RunError
    from tridock.node import __main__ as main
    from tridock.node import verbs

    run_id = run_folder.new_run_id("stuck")
    monkeypatch.setattr(verbs, "stop_processes", lambda *_: Stopped(3, 1))
    arguments = main._parser().parse_args(["stop", run_id, "--workspace", "/nonexistent"])
    with pytest.raises(RunError) as caught:
        arguments.action(arguments)
    assert str(caught.value) == (
        f"{run_id}: has processes that did not end; got 1; "
        "look for processes in state D there; they end when their device or file system answers"
    )


def test_it_loads_nothing_heavy() -> None:
    """Every request to a node starts it again."""
    heavy = ("pydantic", "yaml", "torch", "fabric", "paramiko", "cryptography", "numpy", "rich")
    script = f"import sys, tridock.node.__main__; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_signals_of_the_terminal_do_not_reach_a_run(make_run: MakeRun) -> None:
    folder = make_run("sleep 0.8; exit 5")
    with subprocess.Popen(
        [sys.executable, "-m", "tridock.node", "start", str(folder)], start_new_session=True
    ) as starter:
        starter.wait()
        with pytest.raises(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGINT)
    assert node("follow", str(folder)).returncode == 5
