"""The supervisor with ranks that train nothing: the failures that it detects, and the processes that it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cases import thinned
from tests.distributed.ranks import free_port
from tests.distributed.supervised import SCRIPT, STARTER, Make
from tests.patience import WORK_S
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.lease import HeldLease, newest
from tridock.contracts.run_state import exit_code_of, is_supervised
from tridock.contracts.supervision import Reach
from tridock.contracts.trackers import Tracker, find_python
from tridock.errors import RequestError
from tridock.node.agent.processes import find_processes
from tridock.node.supervisor.process import start

pytestmark = pytest.mark.distributed

POINTS = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1] + "/trackers/tensorboard", size_guidance={"scalars": 0})
found.Reload()
print([event.step for event in found.Scalars("loss")])
"""
SILENT = """
import os, sys, time
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
def reads_a_file_that_does_not_answer():
    time.sleep(9999)
if rank:
    reads_a_file_that_does_not_answer()
dist.barrier()
"""


# ---- deaths --------------------------------------------------------------------------------------


def test_a_run_that_goes_well(make: Make) -> None:
    run = make(steps=20)
    run.start()
    assert run.end() == 0
    assert run.events() == [{"event": "run_finished", "iteration": 20}]
    assert run.said() == []
    run.until(lambda: not is_supervised(run.folder))
    run.until(lambda: not run.others("agent"))


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_rank_that_a_signal_ends_takes_all_along(make: Make, number: signal.Signals, how: str) -> None:
    run = make()
    run.start()
    run.train()
    run.signal(1, number)
    assert run.end() == 4
    (event,) = run.events()
    reason = event.pop("reason")
    assert os.WTERMSIG(event.pop("wait_status")) == number
    about = {"rank": 1, "node": "here", "exit_code": 4, "cause": "rank_signalled"}
    assert event == {"event": "rank_died", **about}
    assert reason.startswith(f"was ended by {how} after iteration ")
    assert run.said() == [f"tridock: rank 1 on here {reason}"]


@pytest.mark.full  # a rank that ends: the signals above
def test_a_rank_that_leaves_early_has_died(make: Make) -> None:
    """Even with exit code 0: no failure exits 0."""
    for code in (0, 3):
        run = make()
        run.start()
        run.train()
        run.ask(1, f"exit{code}")
        assert run.end() == 4
        (event,) = run.events()
        assert event["event"] == "rank_died"
        assert event["reason"].startswith(f"exited with code {code} after iteration ")


def test_a_rank_that_fails_of_itself_gives_its_exit_code(make: Make) -> None:
    run = make()
    run.start()
    run.train()
    run.ask(1, "fail2")
    assert run.end() == 2
    assert run.events() == [{"event": "run_failed", "rank": 1, "reason": "asked to", "agreed": False}]


@pytest.mark.parametrize("script", [SCRIPT, STARTER])
def test_orphans_of_a_launcher_that_is_killed_go_with_it(make: Make, script: str) -> None:
    run = make(script=script)
    run.start()
    run.train()
    found = {process.pid: process.ppid for process in find_processes(run.folder.name)}
    (launcher,) = [pid for pid, parent in found.items() if parent not in found]
    os.kill(launcher, signal.SIGKILL)
    assert run.end() == 137
    assert run.events() == [
        {"event": "launcher_ended", "exit_code": 137, "cause": "launcher_exited", "reason": "was ended by SIGKILL"}
    ]


def test_a_watch_that_is_killed_is_replaced_and_the_run_continues(make: Make) -> None:
    run = make()
    run.start()
    run.train()
    (agent,) = run.others("agent")
    os.kill(agent, signal.SIGKILL)
    run.until(lambda: [pid for pid in run.others("agent") if pid != agent])
    assert run.finish() == 0


REACH = """
while [ -e {hold} ]; do sleep 0.1; done
cat | "$@" | cat
"""


@pytest.mark.full  # tests/integration/test_faults.py: a network that is cut
def test_a_node_waits_for_a_head_that_is_slow_to_connect_again(make: Make, tmp_path: Path) -> None:
    """The connection breaks while both live, and on a busy node a login takes its time."""
    hold = tmp_path / "hold"
    script = REACH.format(hold=shlex.quote(str(hold)))
    run = make(remote=("there",), reach=Reach(("bash", "-c", script, "{node}"), sys.executable))
    run.start()
    run.train()

    def found() -> dict[bool, int]:
        """The node's agent, and the shell that stands for its connection."""
        return {argv[0] == b"bash": pid for pid, argv in run.others("agent").items() if argv[-2] == b"there"}

    # What the shell forks looks like itself at first, and the ranks may train before the agent is there.
    run.until(lambda: found().keys() == {False, True} and len(run.others("agent")) == 3)
    agent, shell = (found()[is_shell] for is_shell in (False, True))
    hold.touch()
    subprocess.run(["pkill", "-KILL", "-x", "cat", "-P", str(shell)], check=True)
    os.kill(shell, signal.SIGKILL)
    time.sleep(12.0)
    assert found()[False] == agent
    hold.unlink()
    run.until(lambda: found().get(False) not in (None, agent))
    run.train(beyond=250)
    assert run.events() == []


def test_without_a_supervisor_the_ranks_end_by_themselves(make: Make) -> None:
    run = make()
    run.start()
    run.train()
    (supervisor,) = run.others("start")
    os.kill(supervisor, signal.SIGKILL)
    assert run.until(lambda: find_processes(run.folder.name) == []) > 15.0
    assert not is_supervised(run.folder)
    assert exit_code_of(run.folder) is None
    (event,) = run.events()
    assert re.fullmatch(r"heard nothing from the head for ([2-9]\d|\d{3,}) s", event.pop("reason"))
    assert event == {"event": "head_lost", "node": "here", "cause": "head_silent"}
    run.until(lambda: not run.others("agent"))


@pytest.mark.full
def test_a_supervisor_that_stood_still_restarts_the_run(make: Make) -> None:
    run = make(max_restarts=1, steps=700)
    run.start()
    run.train()
    (supervisor,) = run.others("start")
    os.kill(supervisor, signal.SIGSTOP)
    run.until(lambda: find_processes(run.folder.name) == [])
    os.kill(supervisor, signal.SIGCONT)
    assert run.end() == 0
    lost, restarted, *_ = run.events("head_lost", "run_restarted", "run_failed", "rank_died")
    assert re.fullmatch(r"heard nothing from the head for (2[5-9]|[3-9]\d|\d{3,}) s", lost["reason"])
    assert restarted["reason"] == f"here {lost['reason']}"


def test_a_supervisor_that_is_killed_has_a_successor(make: Make) -> None:
    """The head's own agent is the first in line. Every node is this machine here. A tracker has each point once."""
    python = find_python("tensorboard")
    trackers = (Tracker("tensorboard", offline=True),) if python else ()
    run = make(max_restarts=2, remote=("there",), reach=Reach(), trackers=trackers)
    metrics = run.folder / run_folder.METRICS

    def log(*iterations: int) -> None:
        with metrics.open("a") as file:
            file.writelines(json.dumps({"iteration": it, "loss": 1 / it}) + "\n" for it in iterations)

    run.start()
    log(*range(1, 21))
    run.train(beyond=20)
    sent = run.folder / ".trackers" / "tensorboard.json"
    run.until(lambda: not trackers or (sent.exists() and '"train": 20' in sent.read_text()))
    (supervisor,) = run.others("start")
    os.kill(supervisor, signal.SIGKILL)
    run.until(lambda: run.events("run_restarted"))
    assert is_supervised(run.folder)
    (taken,) = run.events("taken_over")
    reason = "here does not supervise the run any more"
    assert taken == {"event": "taken_over", "node": "here", "previous": "here", "token": 2, "reason": reason}
    (restarted,) = run.events("run_restarted")
    assert (restarted["attempt"], restarted["reason"]) == (1, reason)
    assert restarted["iteration"] >= 20
    log(*range(15, 31))  # from the checkpoint on
    assert run.finish() == 0
    if python:
        run.until(lambda: '"train": 30' in sent.read_text())
        points = subprocess.run([python, "-c", POINTS, run.folder], capture_output=True, text=True, check=True)
        assert json.loads(points.stdout) == [*range(1, 31)]


def test_a_supervisor_that_has_lost_the_run_ends_alone(make: Make) -> None:
    """It stood still while another took the lease: whatever there is of the run is the other's."""
    run = make(max_restarts=2, remote=("there",), reach=Reach())
    run.start()
    run.train()
    (supervisor,) = run.others("start")
    os.kill(supervisor, signal.SIGSTOP)
    assert HeldLease.take(run.folder, newest(run.folder), "there") is not None
    before = run.events()
    ranks = {process.pid for process in find_processes(run.folder.name)} & {
        beat.pid for number in (0, 1) if (beat := run.beat(number))
    }
    os.kill(supervisor, signal.SIGCONT)
    run.until(lambda: not run.others("start"))
    assert run.said() == ["tridock: the supervisor on here was suspended, and there took over the run"]
    assert run.events() == before
    assert exit_code_of(run.folder) is None
    assert ranks <= {process.pid for process in find_processes(run.folder.name)}


@pytest.mark.full  # test_supervised_restarts.py: a checkpoint that is not the run's own
def test_a_clock_that_was_ahead_hides_no_checkpoint(make: Make) -> None:
    """The run was prepared an hour before the clock was set back: its checkpoints look older than itself."""
    run = make(max_restarts=1, steps=240)
    ahead = time.time() + 3600
    os.utime(run.folder / run_folder.SUPERVISION, (ahead, ahead))
    run.start()
    run.train(beyond=22)
    run.signal(1, signal.SIGKILL)
    assert run.end() == 0
    (restarted,) = run.events("run_restarted")
    assert restarted["iteration"] >= 20


def test_another_node_that_lost_the_head_hides_no_failure(make: Make) -> None:
    run = make()
    run.start()
    run.train()
    append_event(run.folder, Event.HEAD_LOST, node="another", cause=Cause.HEAD_SILENT, reason="heard nothing")
    run.signal(1, signal.SIGKILL)
    assert run.end() == 4
    assert [(died["rank"], died["node"]) for died in run.events("rank_died")] == [(1, "here")]


def test_a_node_that_ended_its_ranks_without_the_head_is_the_cause(make: Make) -> None:
    """Its agent says so; the others lose its ranks, and the launcher ends with their exit code."""
    run = make()
    run.start()
    run.train()
    append_event(run.folder, Event.HEAD_LOST, node="another", cause=Cause.HEAD_SILENT, reason="heard nothing")
    for rank in (0, 1):
        run.ask(rank, "lose")
    assert run.end() == 4
    assert [event["event"] for event in run.events()] == ["head_lost"]
    assert "tridock: another heard nothing" in run.said()


# ---- hangs ---------------------------------------------------------------------------------------


@pytest.mark.full  # tests/integration/test_faults.py: on two nodes
def test_a_rank_that_is_stopped_is_named(make: Make) -> None:
    run = make(hang_timeout_s=2.0)
    run.start()
    run.train()
    run.signal(1, signal.SIGSTOP)
    beat = run.beat(1)  # the limit counts from there
    run.until(lambda: run.events("rank_hung"))
    assert beat is not None
    assert time.monotonic() - beat.time_s > 1.98  # both times are rounded
    assert run.end() == 4
    (event,) = run.events()
    assert (event["rank"], event["node"]) == (1, "here")
    text = r"is stopped \(SIGSTOP, or a debugger\); no progress for ([2-9]|\d\d+) s \(limit 2 s\), phase train .*"
    assert re.fullmatch(text, event["reason"])


def test_a_rank_that_hangs_is_named_with_the_place(make: Make) -> None:
    run = make(hang_timeout_s=2.0)
    run.start()
    run.train()
    run.ask(1, "hang")
    assert run.end() == 4
    (event,) = run.events()
    assert event["event"] == "rank_hung"
    assert event["rank"] == 1
    program = Path(__file__).with_name("steady.py")
    assert event["reason"].startswith(f"hangs while others wait for it at {program}:")
    assert " in hang_for_ever; no progress for " in event["reason"]
    log = (run.folder / run_folder.rank_log(1)).read_text()
    assert log.startswith("tridock: rank 1 makes no progress; its threads:\nCurrent thread ")
    assert f'  File "{program}", line ' in log
    assert " in hang_for_ever\n" in log


def test_a_program_that_is_silent_is_named_with_the_place(make: Make, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(SILENT)
    each = f"RANK=$rank WORLD_SIZE=2 {{python}} {tmp_path}/silent.py {tmp_path}/store"
    run = make(hang_timeout_s=4.0, observed=True, script=f"for rank in 0 1; do {each} & done; wait\n")
    run.start()
    assert run.end(WORK_S) == 4
    (event,) = run.events()
    place = f"{tmp_path}/silent.py:7 in reads_a_file_that_does_not_answer"
    assert (event["cause"], event["rank"]) == (Cause.PROGRAM_SILENT, 1)
    assert event["reason"].startswith(f"is silent at {place} while others wait in a collective: no output and no ")
    log = (run.folder / run_folder.rank_log(0)).read_text()
    assert re.search(r'threads:\n(.*\n)*  File ".+/torch/distributed/distributed_c10d.py", line \d+ in barrier\n', log)


def test_steps_that_are_longer_than_the_limit_are_no_hang_and_a_hang_is_one(make: Make) -> None:
    """From the first step on, before the run has learnt how long its steps take."""
    run = make(hang_timeout_s=1.0, script=f"export STEP_S=2.5\n{SCRIPT}")
    run.start()
    run.train(beyond=3)
    assert run.events() == []
    run.ask(1, "hang")
    assert run.end(WORK_S) == 4
    (event,) = run.events()
    assert (event["event"], event["rank"]) == ("rank_hung", 1)
    found = re.search(r"no progress for (\d+) s \(limit (\d+) s\), phase train", event["reason"])
    assert found is not None
    assert int(found[1]) >= int(found[2]) >= 3 * 2
    text = r"tridock: a step takes \d+ s: a rank counts as hung after \d+ s without progress"
    assert sum(1 for line in run.said() if re.fullmatch(text, line)) == 1


PHASES = (heartbeat.START, heartbeat.FIRST_STEP, heartbeat.EVAL, heartbeat.SAVE, heartbeat.END)


@pytest.mark.parametrize("phase", thinned(PHASES, (heartbeat.SAVE,)))
def test_a_phase_that_is_longer_than_the_limit_of_steps_is_no_hang(make: Make, phase: str) -> None:
    run = make(hang_timeout_s=1.0, steps=3, script=f"export HELD={phase}\n{SCRIPT}")
    run.start()
    run.until(lambda: all((beat := run.beat(rank)) and beat.phase == phase for rank in (0, 1)))
    time.sleep(4.0)
    assert run.events() == []
    (run.folder / "go").touch()
    assert run.end() == 0
    assert [event["event"] for event in run.events()] == ["run_finished"]


@pytest.mark.full  # the steps above
def test_micro_batches_of_a_long_step_are_progress(make: Make) -> None:
    run = make(hang_timeout_s=4.0)
    run.start()
    run.train(beyond=3)
    for rank in (0, 1):
        run.ask(rank, "work")
    run.until(lambda: all((beat := run.beat(rank)) and beat.longest_step_s >= 8.0 for rank in (0, 1)), WORK_S)
    assert run.finish() == 0
    assert [event["event"] for event in run.events()] == ["run_finished"]


@pytest.mark.full  # tests/unit/node: the limits of a verdict
def test_without_a_limit_no_rank_counts_as_hung(make: Make) -> None:
    run = make(hang_timeout_s=0.0)
    run.start()
    run.train()
    run.signal(1, signal.SIGSTOP)
    time.sleep(4.0)
    assert run.events() == []
    run.stop()
    assert run.end() == 143


# ---- stops ---------------------------------------------------------------------------------------


def test_a_stop_ends_the_run_and_does_not_begin_it_again(make: Make) -> None:
    run = make(max_restarts=5)
    run.start()
    run.train()
    answer = json.loads(run.stop().stdout)
    assert answer["remaining"] == 0
    assert exit_code_of(run.folder) == 143
    assert run.end() == 143
    assert run.events("run_restarted", "not_restarted") == []


def test_a_second_run_with_the_port_of_one_that_is_starting_is_refused(make: Make) -> None:
    port = free_port()
    run, second = make(master_port=port), make(master_port=port)
    run.start()
    with pytest.raises(RequestError) as caught:
        start(second.folder)
    assert str(caught.value) == (
        f"{second.folder.name}: launch.master_port is that of {run.folder.name}, which is running; got {port}; "
        "leave launch.master_port out, or give each run its own"
    )
    assert not is_supervised(second.folder)
    assert run.finish() == 0


@pytest.mark.full  # tests/integration/test_faults.py: another clone's twin
def test_a_second_run_beside_a_failing_one_notices_nothing(make: Make) -> None:
    other, run = make(), make(max_restarts=1)
    other.start()
    run.start()
    for one in (other, run):
        one.train()
    before = {process.pid for process in find_processes(other.folder.name)}
    run.signal(0, signal.SIGKILL)
    run.until(lambda: run.events("run_restarted"))
    run.train()
    run.stop()
    assert run.end() == 143
    assert {process.pid for process in find_processes(other.folder.name)} == before
    assert other.finish() == 0
    assert [event["event"] for event in other.events()] == ["run_finished"]
