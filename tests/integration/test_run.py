"""`tridock run` on two Docker hosts: the user's own programs, as torchrun, deepspeed and alone."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.integration.rack import CLUSTER, PROGRAMS, Rack, Up
from tests.integration.rack_runs import RUNS, SLEEP, a_run, one_host, state_of
from tests.integration.support import execute, wait_until
from tests.patience import WORK_S

PROGRAM = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]} {os.environ.get('WORD')}", flush=True)
if "--die" in sys.argv and rank == 1:
    agent = f"{os.environ['TRIDOCK_RUN_FOLDER']}/.heartbeat/agent-host-b"
    def is_watched():  # the agent, who sees how the rank ends, has a descriptor of it
        try:
            found = f"/proc/{open(agent).read()}/fdinfo"
            return any(f"Pid:\\t{os.getpid()}\\n" in open(f"{found}/{it}").read() for it in os.listdir(found))
        except OSError:
            return False
    while not is_watched():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
if "--raise" in sys.argv and rank == 1:
    raise ValueError("rank one has enough")
if "--die" in sys.argv or "--raise" in sys.argv or "--sleep" in sys.argv:
    time.sleep(9999)
"""
ARGUMENT = "it's $HOME %h"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "my code"
    (folder / "data").mkdir(parents=True)
    (folder / "main.py").write_text(PROGRAM)
    (folder / "data" / "large.bin").write_bytes(bytes(1000))
    (folder / ".tridockignore").write_text("data/\n")
    return folder


def run(rack: Rack, code: Path, line: str) -> tuple[int, str, str]:
    """`tridock run` with these arguments: its exit code, its output, and the run's id."""
    argv = [str(PROGRAMS / "python"), "-m", "tridock.cli", "run", "--hosts", f"hostfiles/{CLUSTER}"]
    argv += ["--workdir", str(code), *shlex.split(line)]
    done = execute(*argv, cwd=rack.project, env=rack.environment())
    output = done.stdout + done.stderr
    found = re.search(r"^run (main-\S+): ", output, re.MULTILINE)
    assert found, output
    return done.returncode, output, found[1]


def test_a_killed_rank_restarts_the_run_with_its_resume_command(rack_up: Up, code: Path) -> None:
    rack = rack_up.rack
    line = "--restarts 1 --resume-command 'torchrun main.py --resumed' --env 'WORD=a b' -- torchrun main.py --die"
    exit_code, output, run_id = run(rack, code, line)
    assert exit_code == 0, output
    assert "host-b: rank 1 of 2: ['--die'] a b\n" in output
    assert "tridock: rank 1 on host-b was ended by SIGKILL\n" in output
    assert "tridock: restart 1 of at most 1, with launch-resume.sh\n" in output
    assert {f"rank {rank} of 2: ['--resumed'] a b" for rank in range(2)} <= set(re.findall(r"rank \d of 2: .*", output))
    for host in rack:
        assert host.processes(run_id) == []
        assert host.sh(f"cd {RUNS}/{run_id}/code && find . -type f | sort").split() == ["./.tridockignore", "./main.py"]
    manifest = json.loads(rack["host-a"].sh(f"cat {RUNS}/{run_id}/manifest.json"))
    assert (manifest["code"]["folder"], manifest["code"]["files"]) == (str(code), 2)


@pytest.mark.full  # test_a_killed_rank_restarts_the_run_with_its_resume_command
def test_a_stopped_program_continues_in_its_folder_with_its_resume_command(rack_up: Up, code: Path) -> None:
    rack = rack_up.rack
    line = "--resume-command 'torchrun main.py --resumed' --detach -- torchrun main.py --sleep"
    exit_code, output, run_id = run(rack, code, line)
    assert exit_code == 0, output
    log = f"cat {RUNS}/{run_id}/logs/launcher.log"
    wait_until(lambda: "rank 1 of 2: ['--sleep']" in rack["host-a"].sh(log), "the ranks have begun")
    refused = rack.fab("resume", "--run", run_id)
    assert (refused.returncode, refused.stderr.splitlines()[-1].split(";")[0]) == (2, f"{run_id}: is running")
    assert rack.fab("stop", "--run", run_id).returncode == 0
    for host in rack:
        host.sh(f"echo kept >{RUNS}/{run_id}/code/saved")
    refused = rack.fab("resume", "--run", run_id, "--include", "host-a", "--yes")
    assert refused.returncode == 2
    what = f"{run_id}: continues on the nodes that have its files, host-a, host-b; got host-a; "
    assert what in refused.stderr
    refused = rack.fab("resume", "--run", run_id)
    assert (refused.returncode, "  run torchrun main.py --sleep\n" in refused.stderr) == (2, True)
    done = rack.fab("resume", "--run", run_id, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run {run_id}: torchrun main.py --resumed\n" in done.stdout
    assert {f"rank {rank} of 2: ['--resumed'] None" for rank in range(2)} <= set(
        re.findall(r"rank \d of 2: .*", done.stdout)
    )
    for host in rack:
        assert host.processes(run_id) == []
        assert host.sh(f"cat {RUNS}/{run_id}/code/saved").strip() == "kept"
    assert rack["host-a"].sh(f"cat {RUNS}/{run_id}/exit_code").strip() == "0"


@pytest.mark.full  # tests/unit/node/test_verdict.py
@pytest.mark.parametrize(
    ("per", "what"),
    [
        ("", "{} runs the program once per slot, and each starts ranks itself, in a world of 1"),
        ("--per node", "host-a has a rank 0 in a world of 1, as have all 2 nodes: each trains alone"),
    ],
)
def test_a_program_that_trains_on_each_node_alone_is_no_success(rack_up: Up, code: Path, per: str, what: str) -> None:
    rack = rack_up.rack
    (code / "train.sh").write_text("torchrun --standalone --nnodes 1 --nproc_per_node 1 main.py --sleep\n")
    exit_code, output, run_id = run(rack, code, f"--name main --restarts 2 {per} -- bash train.sh")
    assert exit_code == 4, output
    assert f"tridock: {what.format('host-a')}" in output or f"tridock: {what.format('host-b')}" in output
    assert "tridock: not restarted: the request is wrong\n" in output
    assert "separate-worlds (docs/triage.md)" in rack.fab("triage", "--run", run_id).stdout
    assert [host.processes(run_id) for host in rack] == [[], []]


def test_a_run_has_ended_when_its_program_has(rack_up: Up, code: Path) -> None:
    (code / "train.sh").write_text("sleep 9999 &\necho rank $RANK is done\n")
    exit_code, output, run_id = run(rack_up.rack, code, "--name main -- bash train.sh")
    assert exit_code == 0, output
    for rank, host in enumerate(rack_up.rack):
        assert f"{host.name}: rank {rank} is done\n" in output
        pattern = rf"{host.name}: tridock: the program has ended and left sleep \(pid \d+\): ended with the run\n"
        assert re.search(pattern, output), output
        assert host.processes(run_id) == []


@pytest.mark.full  # test_security.py: hostile words
def test_deepspeed_hands_every_word_to_the_ranks(rack_up: Up, code: Path) -> None:
    exit_code, output, _ = run(rack_up.rack, code, f"-- deepspeed main.py {shlex.quote(ARGUMENT)}")
    assert exit_code == 0, output
    arguments = re.findall(r"rank (\d) of 2: \['--local_rank=\d', (.*)\] None", output)
    assert sorted(arguments) == [(str(rank), repr(ARGUMENT)) for rank in range(2)]


@pytest.mark.full  # tests/unit/launchers/test_programs.py, tests/unit/train/test_torchrun_variables.py
def test_a_script_with_torchrun_runs_once_per_node(rack_up: Up, code: Path) -> None:
    (code / "train.sh").write_text('echo "node $NODE_RANK of $NNODES"\nexec torchrun main.py --raise\n')
    exit_code, output, run_id = run(rack_up.rack, code, "--name main --per node -- bash train.sh")
    assert exit_code == 4
    assert {f"host-{'ab'[node]}: node {node} of 2" for node in range(2)} <= set(output.splitlines())
    assert {f"rank {rank} of 2: ['--raise'] None" for rank in range(2)} == set(re.findall(r"rank \d of 2: .*", output))
    assert f"{run_id}: the run failed; got exit code 4, host-b failed: its program ended with exit code 1: " in output
    assert (
        "  cause    rank 1 ended first, with exit code 1\n" in output
    )  # torchrun's account: its ranks are not Tridock's
    assert [host.processes(run_id) for host in rack_up.rack] == [[], []]


def test_the_first_rank_that_fails_is_named(rack_up: Up, code: Path) -> None:
    exit_code, output, run_id = run(rack_up.rack, code, "-- python main.py --raise")
    assert exit_code == 4
    assert "host-b: ValueError: rank one has enough\n" in output
    assert re.search(rf"{run_id}: the run failed; got exit code \d, rank 1 on host-b exited with code 1; ", output)
    assert "  error    ValueError: rank one has enough\n" in output
    log = rack_up.rack.fab("logs", "--run", run_id, "--rank", "1")
    assert log.stdout.endswith("ValueError: rank one has enough\n"), log.stderr
    assert "rule     program-failed (docs/triage.md)" in output
    assert [host.processes(run_id) for host in rack_up.rack] == [[], []]


@pytest.mark.full  # test_runs_on_docker_hosts.py stops a run
def test_stop_ends_the_program_on_every_node(rack_up: Up, code: Path) -> None:
    rack = rack_up.rack
    exit_code, output, run_id = run(rack, code, "--detach -- python main.py --sleep")
    assert exit_code == 0, output
    assert f"Come back with: tridock logs --hosts hostfiles/{CLUSTER} --run {run_id}\n" in output
    wait_until(lambda: [len(host.processes(run_id, "^python main.py --sleep")) for host in rack] == [1, 1], "2 ranks")
    done = rack.fab("stop", "--run", run_id)
    assert done.returncode == 0, done.stderr
    assert [host.processes(run_id) for host in rack] == [[], []]
    assert rack["host-a"].sh(f"cat {RUNS}/{run_id}/exit_code") == "143\n"


def test_what_cannot_run_leaves_nothing(rack_up: Up, code: Path) -> None:
    rack = rack_up.rack
    before = rack["host-a"].sh(f"ls {RUNS}")
    argv = [str(PROGRAMS / "python"), "-m", "tridock.cli", "run", "--hosts", f"hostfiles/{CLUSTER}", "--workdir"]
    for options, message in (
        (
            [str(code), "--", "torchrun", "--nnodes", "3", "main.py"],
            "command: torchrun gets these options from Tridock",
        ),
        ([str(code), "--env", "WORD", "--", "true"], "--env: must be a name, =, and a value; got 'WORD'"),
        ([str(code / "none"), "--", "true"], "is not a folder with code"),
        ([str(code)], "PROGRAM: or --config must name the program, but not both; write it after --"),
    ):
        done = execute(*argv, *options, cwd=rack.project, env=rack.environment())
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert rack["host-a"].sh(f"ls {RUNS}") == before


# ---- faults of hosts ------------------------------------------------------------------------------


def test_a_run_whose_head_left_the_hostfile_runs_on_has_its_slots_and_can_be_stopped(rack_up: Up) -> None:
    rack = rack_up.rack
    with a_run(rack, "headless") as run_id:
        shrunk = rack.write_cluster("shrunk", "host-b slots=1\n", **one_host(rack), name=CLUSTER)
        status = rack.fab("status", hosts=shrunk)
        line = next(line for line in status.stdout.splitlines() if run_id in line)
        assert "running" in line, status.stdout + status.stderr
        done = rack.fab("run", "--workdir", "hostfiles", "--no-check", "--detach", *SLEEP, hosts=shrunk)
        assert done.returncode == 2
        assert f"{run_id}: is running on slots that this run would use; got host-b: 0" in done.stderr
        stopped = rack.fab("stop", hosts=shrunk)
        assert (stopped.returncode, stopped.stdout) == (
            0,
            f"stopped {run_id} on host-b\n"
            "host-a: not in the hostfile; the run's supervisor ends it there too, within seconds\n",
        )
        wait_until(lambda: not any(host.processes(run_id) for host in rack), "it ends on the head too")
        assert state_of(rack, run_id) == "stopped"


def test_a_run_outlives_a_docker_engine_that_is_restarted(rack_up: Up) -> None:
    """As a package's upgrade does; the engine ends its containers, and starts them again."""
    rack = rack_up.rack
    patient = {"name": "upgraded", "engine": "command", "command": SLEEP[1:], "code": "hostfiles"}
    patient["restart"] = {"max": 1, "node_timeout": 1000}
    (rack.project / "upgraded.yaml").write_text(json.dumps(patient))
    with a_run(rack, "upgraded", config="upgraded.yaml") as run_id:
        before = rack["host-b"].processes(run_id, "^sleep")
        rack["host-b"].sh("pkill -TERM -x dockerd")
        wait_until(lambda: rack["host-b"].processes(run_id, "^sleep") not in ([], before), "it runs again", WORK_S)
        assert state_of(rack, run_id) == "running"
        events = [json.loads(line) for line in rack["host-a"].sh(f"cat {RUNS}/{run_id}/events.jsonl").splitlines()]
        assert [event["event"] for event in events].count("run_restarted") == 1
