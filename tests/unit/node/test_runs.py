"""Start, follow, list and stop runs: real processes, started and looked at as the operator's side does it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.node.conftest import FINISHED, answer, node, wait_until
from tridock.contracts import run_folder
from tridock.contracts.run_state import LOCK, exit_code_of, is_supervised

MakeRun = Callable[..., Path]


def state(workspace: Path, folder: Path) -> object:
    runs = answer("runs", "--workspace", str(workspace))
    return next(run["state"] for run in runs if run["run_id"] == folder.name)


def start(folder: Path) -> None:
    done = node("start", str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_run_of_a_newer_tridock_is_refused_with_a_message(make_run: MakeRun) -> None:
    folder = make_run(FINISHED)
    path = folder / run_folder.SUPERVISION
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_tomorrow": 1}))
    done = node("start", str(folder))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "the request: is from another version of Tridock than this node's; "
        "got not of type Supervision: Supervision has no of_tomorrow here; "
        "build the image again with tridock image, then run tridock up, or use the Tridock that began the run\n"
    )
    assert not (folder / LOCK).exists()


def test_a_run_from_start_to_end(workspace: Path, make_run: MakeRun, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    wait = f"until [ -e {seen} ]; do sleep 0.05; done"
    folder = make_run(f'echo started; echo to stderr >&2; cat; echo "$TRIDOCK_RUN_ID"; {wait}; {FINISHED}')
    assert state(workspace, folder) == "ready"
    start(folder)
    assert state(workspace, folder) == "running"
    seen.touch()
    followed = node("follow", str(folder))
    assert followed.stdout == f"started\nto stderr\n{folder.name}\n"
    assert (followed.returncode, followed.stderr) == (0, "")
    assert (folder / run_folder.EXIT_CODE).read_text() == "0\n"
    assert state(workspace, folder) == "done"
    wait_until(lambda: not is_supervised(folder))
    # A run that is over can be read again, or from where one left off.
    assert node("follow", str(folder), "--offset", "8").stdout == f"to stderr\n{folder.name}\n"


def test_following_shows_output_as_it_comes(make_run: MakeRun, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    folder = make_run(f"echo first; until [ -e {printed} ]; do sleep 0.05; done; echo second; {FINISHED}")
    start(folder)
    with subprocess.Popen(
        [sys.executable, "-m", "tridock.node", "follow", str(folder)], stdout=subprocess.PIPE
    ) as follow:
        assert follow.stdout is not None
        assert follow.stdout.readline() == b"first\n"
        printed.touch()
        assert follow.stdout.readline() == b"second\n"
    assert follow.returncode == 0


def test_following_outlives_the_disk_that_its_output_goes_to(make_run: MakeRun) -> None:
    folder = make_run(f'echo one; while [ ! -e "$FOLDER/go" ]; do sleep 0.05; done; {FINISHED}')
    start(folder)
    log = folder / run_folder.LAUNCHER_LOG
    wait_until(lambda: "one" in run_folder.read_text(log))
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen([sys.executable, "-m", "tridock.node", "follow", str(folder)], stdout=full) as follow,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            follow.wait(2.0)
        (folder / "go").touch()
        assert follow.wait(STEP_S) == 0


def test_following_never_loses_the_last_lines(make_run: MakeRun) -> None:
    """The end of the log and the exit code come together: the log must win."""
    for _ in range(5):
        folder = make_run(f"{FINISHED} head -c 300000 /dev/zero | tr '\\0' x; exec echo; ")
        start(folder)
        assert len(node("follow", str(folder)).stdout) == 300001


@pytest.mark.parametrize(
    ("script", "code", "name"),
    [
        ("exit 7", 7, "failed"),
        ("kill -KILL $$", 137, "failed"),
        ("kill -SEGV $$", 139, "failed"),
        ("exit 0", 4, "failed"),
        (FINISHED, 0, "done"),
    ],
)
def test_exit_codes(workspace: Path, make_run: MakeRun, script: str, code: int, name: str) -> None:
    folder = make_run(script)
    start(folder)
    assert node("follow", str(folder)).returncode == code
    assert exit_code_of(folder) == code
    assert state(workspace, folder) == name
    (run,) = answer("runs", "--workspace", str(workspace))
    assert run["exit_code"] == code


def test_a_launcher_that_ends_well_without_its_ranks_is_a_failure(make_run: MakeRun) -> None:
    folder = make_run("exit 0")
    start(folder)
    followed = node("follow", str(folder))
    assert followed.stdout == "tridock: the launcher ended with 0, but rank 0 never finished\n"
    (event,) = [json.loads(line) for line in (folder / run_folder.EVENTS).read_text().splitlines()]
    assert event.pop("time")
    assert event == {
        "event": "launcher_ended", "exit_code": 4, "cause": "launcher_exited",
        "reason": "ended with 0, but rank 0 never finished",
    }  # fmt: skip


def test_a_run_outlives_the_session_that_began_it(make_run: MakeRun) -> None:
    """As `docker exec` and ssh end: the whole session gets SIGHUP, the terminal goes away."""
    folder = make_run(f"sleep 1; echo still here; {FINISHED}")
    session = subprocess.Popen(
        ["bash", "-c", f"'{sys.executable}' -m tridock.node start '{folder}'; echo; sleep 9999"],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Under nohup it would be ignored, and bash cannot change that.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert session.stdout is not None
    assert session.stdout.readline() == b"\n"
    os.killpg(session.pid, signal.SIGHUP)
    assert session.wait() == -signal.SIGHUP
    session.stdout.close()
    assert node("follow", str(folder)).stdout == "still here\n"
    assert exit_code_of(folder) == 0


def test_start_holds_nothing_open(make_run: MakeRun) -> None:
    """A start over ssh or `docker exec` returns at once only where the run keeps neither stdout nor stderr."""
    folder = make_run("sleep 9999")
    start(folder)
    answer("stop", folder.name, "--workspace", str(folder.parents[1]))


def test_starting_twice_is_refused(make_run: MakeRun) -> None:
    folder = make_run(FINISHED)
    started = [
        subprocess.Popen([sys.executable, "-m", "tridock.node", "start", str(folder)], stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    outcomes = sorted((process.communicate()[1].decode(), process.returncode) for process in started)
    refused = f"{folder.name}: has been started already; launch again: every run has an id of its own\n"
    assert outcomes == [("", 0), *[(refused, 2)] * 3]
    node("follow", str(folder))
    assert len((folder / run_folder.EVENTS).read_text().splitlines()) == 1
    done = node("start", str(folder))
    assert (done.returncode, done.stderr) == (2, refused)


def test_a_run_that_ended_is_started_again(make_run: MakeRun) -> None:
    folder = make_run(f'[ -e "$FOLDER/second" ] || exit 3\n{FINISHED}echo second')
    start(folder)
    assert node("follow", str(folder)).returncode == 3
    (folder / "second").touch()
    (folder / run_folder.STOPPED).touch()
    wait_until(lambda: not is_supervised(folder))  # it reports the run's end before it exits
    offset = (folder / run_folder.LAUNCHER_LOG).stat().st_size
    assert node("start", "--again", str(folder)).returncode == 0
    done = node("follow", str(folder), "--offset", str(offset))
    assert (done.returncode, done.stdout) == (0, "second\n")


def test_a_run_that_continues_is_not_started_again(make_run: MakeRun) -> None:
    folder = make_run("sleep 9999")
    start(folder)
    done = node("start", "--again", str(folder))
    assert (done.returncode, done.stderr) == (
        2, f"{folder.name}: is already running; wait for its end, or stop it\n",
    )  # fmt: skip
    answer("stop", folder.name, "--workspace", str(folder.parents[1]))


def test_a_supervisor_that_has_outlived_its_job_makes_room(make_run: MakeRun) -> None:
    first = 'touch "$FOLDER/first"; until [ -e "$FOLDER/.stopped" ]; do sleep 0.1; done'
    folder = make_run(f'[ -e "$FOLDER/first" ] && exit 3; {first}')
    start(folder)
    wait_until((folder / "first").exists)
    done = node("start", "--again", "--patience", f"{STEP_S}", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert node("follow", str(folder)).returncode == 3
    assert not (folder / run_folder.STOPPED).exists()


def test_the_word_to_save_waits_for_a_rank(make_run: MakeRun) -> None:
    rank = "from tridock.contracts import heartbeat; import os, pathlib, signal, sys, time\n"
    rank += "folder = pathlib.Path(sys.argv[1])\n"
    rank += "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
    rank += 'while not os.path.exists(folder / "ready"): time.sleep(0.05)\n'
    rank += "time.sleep(1.0); heartbeat.start(folder, 0)\n"
    folder = make_run(f"{FINISHED}exec {sys.executable} -c '{rank}time.sleep(9999)' \"$FOLDER\"")
    start(folder)
    assert answer("save", str(folder)) == {"ranks": 0}
    (folder / "ready").touch()
    assert answer("save", str(folder), "--patience", f"{STEP_S}") == {"ranks": 1}
    wait_until(lambda: exit_code_of(folder) is not None)
    assert answer("save", str(folder), "--patience", f"{STEP_S}") == {"ranks": 0}


def test_what_cannot_be_started(workspace: Path) -> None:
    done = node("start", str(workspace))
    assert (done.returncode, done.stderr) == (
        2, f"{workspace}: is not a run's folder; got {workspace.name}; give /workspace/runs/<run-id>\n",
    )  # fmt: skip
    folder = workspace / "runs" / run_folder.new_run_id("x")
    folder.mkdir(parents=True)
    done = node("start", str(folder))
    assert (done.returncode, done.stderr) == (
        2, f"{folder}: holds no launch.sh; start runs with tridock launch or tridock train\n",
    )  # fmt: skip
    done = node("follow", str(folder))
    assert (done.returncode, done.stderr) == (
        2, f"{folder.name}: has no output here; got {folder}; see tridock status for the runs\n",
    )  # fmt: skip


def test_a_start_that_fails_can_be_tried_again(make_run: MakeRun) -> None:
    folder = make_run(FINISHED)
    # The supervisor cannot find bash; start says so and leaves the run as it was.
    done = subprocess.run(
        [sys.executable, "-m", "tridock.node", "start", str(folder)],
        env={"PATH": "/nonexistent", "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = folder / run_folder.LAUNCHER_LOG
    assert (done.returncode, done.stderr) == (
        2, f"{folder.name}: could not be started; got exit code 1; look at {log}\n",
    )  # fmt: skip
    assert not (folder / LOCK).exists()
    start(folder)
    assert node("follow", str(folder)).returncode == 0


def test_a_lost_run_is_named_as_such(workspace: Path, make_run: MakeRun) -> None:
    folder = make_run("sleep 9999")
    start(folder)
    pattern = f"tridock.node start {folder}"
    (supervisor,) = (
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and pattern in _cmdline(entry).replace("\0", " ")
    )
    os.kill(supervisor, signal.SIGKILL)
    followed = node("follow", str(folder))
    assert followed.returncode == 4
    assert followed.stderr == (
        f"{folder.name}: was lost: nothing supervises it and no exit code was written; "
        "its node or its supervisor was ended; continue it with tridock resume, or launch again\n"
    )
    assert state(workspace, folder) == "lost"
    # Its processes live on, and can still be found and stopped.
    stopped = answer("stop", folder.name, "--workspace", str(workspace))
    assert stopped["remaining"] == 0
    assert stopped["stopped"] in (1, 2)  # the second may end because the first has


def _cmdline(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text()
    except OSError:
        return ""


def test_runs_are_listed_by_age_with_their_last_metrics(workspace: Path) -> None:
    for run_id in ("b-20260102-000000-0000", "a-20260103-000000-0000", "z-y-20260101-000000-abcd", "not-a-run"):
        (workspace / "runs" / run_id).mkdir(parents=True)
    folder = workspace / "runs" / "b-20260102-000000-0000"
    lines = [{"iteration": n, "loss": 1 / (n + 1)} for n in range(5000)]
    lines.append({"iteration": 5000, "split": "valid", "loss": 3.0})
    (folder / run_folder.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iterat')
    runs = answer("runs", "--workspace", str(workspace))
    assert [run["run_id"] for run in runs] == [
        "z-y-20260101-000000-abcd", "b-20260102-000000-0000", "a-20260103-000000-0000",
    ]  # fmt: skip
    age = runs[1].pop("age_s")
    assert 0.0 <= age < STEP_S
    assert runs[1] == {
        "run_id": folder.name, "state": "ready", "exit_code": None, "created": "20260102-000000", "metrics": lines[-2],
        "experiment": "b", "nodes": [], "train_iters": None, "duration_s": None, "head": "", "slots": {},
        "has_processes": False, "started_by": "", "disk_bytes": None, "folder_id": "",
    }  # fmt: skip
    assert runs[0]["metrics"] is None


def test_a_workspace_without_runs(workspace: Path) -> None:
    assert answer("runs", "--workspace", str(workspace)) == []


def test_looking_never_hinders_a_start(make_run: MakeRun) -> None:
    """Whoever looks takes the same lock, shared and for a moment: two lookers must see the truth."""
    folder = make_run("sleep 0.5")
    (folder / LOCK).touch()
    assert not is_supervised(folder)
    first = os.open(folder / LOCK, os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_SH)
    assert not is_supervised(folder)
    os.close(first)


def test_a_stop_returns_once_its_end_is_recorded(workspace: Path, make_run: MakeRun) -> None:
    folder = make_run("sleep 9999")
    start(folder)
    assert answer("stop", folder.name, "--workspace", str(workspace))["remaining"] == 0
    assert exit_code_of(folder) == 143
    wait_until(lambda: not is_supervised(folder))


def test_a_run_is_removed_unless_it_is_in_use(workspace: Path, make_run: MakeRun, tmp_path: Path) -> None:
    over, loaded, runs = make_run(FINISHED), tmp_path / "loaded", workspace / "runs"
    start(over)
    wait_until(lambda: exit_code_of(over) == 0 and not is_supervised(over))
    running = make_run(f"until [ -e {loaded} ]; do sleep 0.05; done; {FINISHED}")
    with (running / run_folder.EXPERIMENT).open("a") as file:
        file.write(f"train:\n  load: runs/{over.name}/checkpoints\n")
    start(running)
    argv = ("remove", "--workspace", str(workspace), over.name, running.name)
    assert answer(*argv) == {"kept": [over.name, running.name]}
    loaded.touch()
    wait_until(lambda: exit_code_of(running) == 0 and not is_supervised(running))
    (runs / f".{over.name}.removed").mkdir()  # of a removal that was killed
    assert answer(*argv) == {"kept": []}
    assert [path.name for path in runs.iterdir() if path.name != run_folder.QUEUE] == []


def test_a_run_stays_on_a_node_that_is_not_the_head_of_the_one_that_loaded_it(
    workspace: Path, make_run: MakeRun
) -> None:
    over, other = make_run(FINISHED), make_run(FINISHED)
    (other / run_folder.EXPERIMENT).write_text(f"train:\n  load: runs/{over.name}/checkpoints\n")
    argv = ("remove", "--workspace", str(workspace), over.name)
    with subprocess.Popen(["sleep", "9999"], env={**os.environ, "TRIDOCK_RUN_ID": other.name}) as rank:
        try:
            wait_until(lambda: answer(*argv) == {"kept": [over.name]})
        finally:
            rank.kill()
    assert answer(*argv) == {"kept": []}


@pytest.mark.parametrize("run_id", ["../data", ".", "a b"])
def test_only_a_run_is_removed(workspace: Path, run_id: str) -> None:
    (workspace / "data").mkdir(parents=True)
    assert node("remove", "--workspace", str(workspace), run_id).returncode != 0
    assert (workspace / "data").is_dir()
