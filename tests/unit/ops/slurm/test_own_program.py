"""The user's own program in a job: its script, its code, its end, and when it is queued again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.ops.slurm.conftest import PROFILE, SINFO, Answer, Slurm, begin_job, events, requeued
from tridock.cli import main

ON_NODE = ("bash", "-c", 'exec bash "${1//%n/0}"', "bash")
SAVES = 'trap "echo saved; exit 3" USR1; touch $TRIDOCK_RUN_FOLDER/.signalled; while :; do sleep 0.05; done'


@pytest.fixture
def folder(tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> Path:
    answer("scontrol", "JobState=RUNNING")
    return begin_job(tmp_path / "work", "mine", monkeypatch)


def run(folder: Path, *command: str, **fields: object) -> int:
    config = folder.parent.parent / "mine.yaml"
    config.write_text(json.dumps({"name": "mine", "engine": "command", "command": command, **fields}))
    script = str(folder / "launch-node-%n.sh")
    return main(["slurm", "supervise", "--config", str(config), str(folder), "--", *ON_NODE, script])


def test_it_runs_in_a_copy_of_its_code_with_the_variables_of_its_ranks(folder: Path) -> None:
    (folder.parent.parent / "greet.sh").write_text("echo $GREETING $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT")
    program = (". ./greet.sh; pwd; echo step=7 loss=1.5", "python -c 'import tridock; print(tridock.__file__)'")
    assert run(folder, "bash", "-c", "; ".join(program), env={"GREETING": "hello"}, metrics="key=value") == 0
    printed = (folder / "logs" / "rank-0.log").read_text().splitlines()
    assert printed[:2] == ["hello 0 of 1 at n1:20017", str(folder / "code")]
    assert json.loads((folder / "metrics.jsonl").read_text())["loss"] == 1.5
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["slurm"], manifest["code"]["folder"]) == ({"job": "17"}, str(folder.parent.parent))


def test_it_has_the_environment_of_the_job_and_not_that_of_tridock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    path = os.environ["PATH"]
    for name in ("SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "0")
    assert run(folder, "bash", "-c", 'echo "$PATH"; echo "$PYTHONPATH"; echo "${SLURM_PROCID-none} $SLURM_JOB_ID"') == 0
    printed = (folder / "logs" / "rank-0.log").read_text().splitlines()
    assert printed == [path, f"/mine:{folder}/.python", "none 17"]
    assert [entry.name for entry in (folder / ".python").iterdir()] == ["tridock"]


def test_a_program_per_node_has_the_variables_of_its_node(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "echo node $NODE_RANK of $NNODES: $NPROC_PER_NODE at $MASTER_ADDR:$PET_MASTER_PORT ${RANK-}"
    assert run(folder, "bash", "-c", script, per="node") == 0
    assert "node 0 of 1: 1 at n1:20017\n" in capfd.readouterr().out
    assert not (folder / "logs" / "rank-0.log").exists()


def test_a_code_that_means_something_else_here_is_a_failure(folder: Path, tmp_path: Path) -> None:
    assert run(folder, "bash", "-c", "exit 85") == 4
    assert (folder / "exit_code").read_text() == "4\n"
    assert events(folder, "rank_died")[0]["reason"] == "exited with code 85"
    assert requeued(tmp_path) == 0


def test_a_program_whose_time_is_over_saves_and_is_queued_again(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resume = ["bash", "-c", "echo resumed"]
    assert run(folder, "bash", "-c", SAVES, resume_command=resume) == 85
    assert (folder / "logs" / "rank-0.log").read_text() == "saved\n"
    assert events(folder, "job_requeued") == [{"iteration": None, "reason": "its time was over"}]
    assert "tridock: queued again: its time was over; it starts again\n" in capfd.readouterr().out
    assert requeued(tmp_path) == 1
    assert json.loads((folder / "supervision.json").read_text())["save_signal"] == "SIGUSR1"
    assert run(folder, "bash", "-c", SAVES, resume_command=resume) == 0
    assert (folder / "logs" / "rank-0.log").read_text() == "saved\nresumed\n"


def test_a_program_that_comes_no_further_is_not_queued_again_for_ever(folder: Path, tmp_path: Path) -> None:
    before = json.dumps({"event": "job_requeued", "iteration": 3}) + "\n"
    (folder / "events.jsonl").write_text(2 * before)
    assert run(folder, "bash", "-c", f"echo step=3 loss=1; {SAVES}", metrics="key=value") == 85
    text = "the run has come no further than iteration 3 in 3 jobs"
    assert events(folder, "job_not_requeued") == [{"reason": text}]
    assert requeued(tmp_path) == 0


def test_setup_runs_first_and_its_failure_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "cat", "made", setup="echo of setup >made") == 0
    assert (folder / "logs" / "rank-0.log").read_text() == "of setup\n"


# ---- submit ----


@pytest.fixture
def program(workspace: Path, answer: Answer) -> Path:
    answer("sinfo", SINFO)
    answer("sbatch", "17")
    (workspace / "mine").mkdir()
    (workspace / "mine" / "train.py").write_text("print('hello')")
    fields = {"name": "mine", "engine": "command", "command": ["torchrun", "train.py"], "code": "mine"}
    (workspace / "mine.yaml").write_text(json.dumps(fields))
    return workspace


def test_submit_puts_the_code_into_the_runs_folder(slurm: Slurm, program: Path) -> None:
    code, out, _ = slurm("submit", "mine.yaml", "--profile", "site.yaml", "--nodes", "2", "--set", "env.A=one")
    assert code == 0
    folder = Path(out.split()[-1])
    assert (folder / "code" / "train.py").read_text() == "print('hello')"
    assert "A: one\n" in (folder / "experiment.yaml").read_text()
    script = (folder / "job.sh").read_text()
    assert script.startswith("#!/usr/bin/env bash\n# mine: 4 ranks on 2 nodes. Written by `tridock slurm`.\n")
    assert "#SBATCH --ntasks-per-node=1\n" in script
    assert script.endswith(
        "  srun --ntasks-per-node=1 --kill-on-bad-exit=0 --label \\\n"
        """  bash -c 'exec bash "${1//%n/$SLURM_NODEID}"' bash "$RUN/launch-node-%n.sh"\n"""
    )
    plan = json.loads((folder / "plan.json").read_text())
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1, 2, 3]
    assert subprocess.run(["bash", "-n", folder / "job.sh"], check=False).returncode == 0


def test_run_submits_a_job_where_a_profile_says_so(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(program)
    arguments = ("--nodes", "2", "--workdir", "mine", "--detach", "--", "torchrun", "train.py")
    os.mkfifo(program / "mine" / "pipe")
    assert main(["run", "--slurm", "site.yaml", *arguments]) == 0
    captured = capsys.readouterr()
    assert "not copied: pipe (no file)\n" in captured.err
    out = captured.out.splitlines()
    assert out[0] == "job 17"
    assert out[1].startswith("run train-")
    assert main(["run", "--slurm", "site.yaml", "--hosts", "h", "--queue", *arguments]) == 2
    got, todo = "--hosts, --queue", "leave it out: Slurm chooses the nodes, and jobs wait for them"
    assert capsys.readouterr().err == f"--slurm: cannot be combined with these options; got {got}; {todo}\n"


LOSS = '{"iteration": 1, "loss": %s}\n'


def test_reproduce_submits_the_same_job_with_the_code_of_then_and_compares(
    slurm: Slurm, program: Path, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    (program / "site.yaml").write_text(PROFILE + "srun: [--mpi=none]\ncontainer: {mounts: [/scratch]}\n")
    _, out, _ = slurm("submit", "mine.yaml", "--profile", "site.yaml", "--nodes", "2")
    first = Path(out.split()[-1])
    (first / "metrics.jsonl").write_text(LOSS % 2.5)
    (program / "mine" / "train.py").write_text("print('changed since')")
    answer("squeue")
    # The job: it ends at once.
    line = LOSS.strip() % 2.5
    ended = f"for run in {program}/runs/*-*; do echo 0 >$run/exit_code; echo '{line}' >$run/metrics.jsonl; done"
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("exit 0", f"{ended}\nexit 0"))
    assert main(["reproduce", "--run", str(first)]) == 2
    todo = "read the lines above, then give --yes; a host may have written this folder"
    assert capsys.readouterr().err.splitlines() == [
        f"{first} would:",
        "  run torchrun train.py",
        "  set slurm.gpu_request: none",
        '  set slurm.container.mounts: ["/scratch"]',
        '  set slurm.srun: ["--mpi=none"]',
        f"  send 1 file of {first}/code",
        f"{first}: is not allowed to do that; {todo}",
    ]
    assert list((program / "runs").glob("mine-*")) == [first]
    assert main(["reproduce", "--run", str(first), "--yes", "--json"]) == 0, capsys.readouterr()
    out, err = capsys.readouterr()
    (second,) = (path for path in (program / "runs").glob("mine-*") if path != first)
    assert f"run {second.name}: repeats {first.name}; folder {second}\n" in err
    found = json.loads(out)
    assert (found["version"], found["reproduction"]["verdict"]) == (1, "identical")
    assert (second / "code" / "train.py").read_text() == "print('hello')"
    then, now = ((folder / "job.sh").read_text().replace(folder.name, "RUN") for folder in (first, second))
    assert then == now
    assert "--mpi=none" in now
    assert json.loads((second / "reproduction.json").read_text())["verdict"] == "identical"


def test_code_that_is_not_there_any_more_leaves_no_run(
    program: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = slurm("submit", "mine.yaml", "--profile", "site.yaml")
    folder = Path(out.split()[-1])
    shutil.rmtree(program / "runs" / ".code")
    (folder / "code" / "train.py").unlink()
    (folder / "code" / "train.py").write_text("the program has changed it")
    assert main(["reproduce", "--run", str(folder), "--yes"]) == 2
    what, todo = "has files that changed after they were read", "undo what has changed there"
    assert capsys.readouterr().err.endswith(f"{folder}/code: {what}; got train.py; {todo}\n")
    assert list((program / "runs").glob("mine-*")) == [folder]


def test_reproduce_of_a_job_whose_request_is_not_known(
    program: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = slurm("submit", "mine.yaml", "--profile", "site.yaml")
    folder = Path(out.split()[-1])
    (folder / "slurm.json").write_text('{"job_id": "17"}')
    assert main(["reproduce", "--run", str(folder)]) == 2
    what, todo = "does not contain the job's request", "submit it anew: tridock slurm submit, or tridock run --slurm"
    assert capsys.readouterr().err == f"{folder}/slurm.json: {what}; {todo}\n"
    assert len(list((program / "runs").glob("mine-*"))) == 1


def test_mpirun_starts_its_ranks_by_srun_from_the_first_node(slurm: Slurm, program: Path) -> None:
    (program / "mpi.yaml").write_text('{"name": "mpi", "engine": "command", "command": ["mpirun", "./a.out"]}')
    code, out, _ = slurm("render", "mpi.yaml", "--profile", "site.yaml", "--nodes", "2")
    assert code == 0
    assert "#SBATCH --ntasks-per-node=2\n" in out
    options = ("--container", "pyxis", "--image", "a.sqsh")
    code, _, err = slurm("render", "mpi.yaml", "--profile", "site.yaml", *options)
    what = "starts its ranks with srun, and cannot from within pyxis"
    assert (code, err) == (2, f"command: {what}; got mpirun; use torchrun, or container.kind none\n")


def test_what_the_cluster_decides_is_refused_before_anything_is_written(slurm: Slurm, program: Path) -> None:
    fields = {"name": "mine", "engine": "command", "command": ["torchrun", "--nnodes", "3", "train.py"]}
    (program / "bad.yaml").write_text(json.dumps(fields))
    code, _, err = slurm("submit", "bad.yaml", "--profile", "site.yaml")
    assert code == 2
    assert "command: torchrun gets these options from Tridock; got --nnodes" in err
    assert not list((program / "runs").glob("bad-*"))
    code, _, err = slurm("submit", "mine.yaml", "t.yaml", "--profile", "site.yaml")
    what, todo = "mix your own programs with experiments", "submit them in another job"
    assert (code, err) == (2, f"CONFIG: {what}; got mine.yaml; {todo}\n")
