"""What a job's script becomes: what it refuses, and when it has the job queued again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.unit.ops.slurm.conftest import Answer, begin_job, events, requeued
from tridock.cli import main
from tridock.ops.slurm import supervise

# A run of one rank that needs no torch: it reports its end as rank 0 would.
RANK = """\
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
with (folder / "events.jsonl").open("a") as events:
    for event in sys.argv[2].split(","):
        events.write(json.dumps({"event": event, "iteration": 5}) + "\\n")
(folder / "argv").write_text(json.dumps(sys.argv[3:]))
sys.exit(85 if "run_preempted" in sys.argv[2] else 0)
"""


@pytest.fixture
def folder(workspace: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workspace / "rank.py").write_text(RANK)
    return begin_job(workspace, "t", monkeypatch)


def run(folder: Path, events: str, *options: str) -> int:
    config = str(folder.parent.parent / "t.yaml")
    command = [sys.executable, str(folder.parent.parent / "rank.py"), str(folder), events]
    return main(["slurm", "supervise", "--config", config, *options, str(folder), "--", *command])


def test_a_run_to_its_end(folder: Path, answer: Answer, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "run_started,run_finished", "--env", "GREETING=it's me") == 0
    assert (folder / "exit_code").read_text() == "0\n"
    assert "export GREETING='it'\"'\"'s me'\n" in (folder / "launch.sh").read_text()
    assert json.loads((folder / "plan.json").read_text())["ranks"][0]["node"] == "n1"
    assert json.loads((folder / "slurm.json").read_text())["job_id"] == "17"
    assert json.loads((folder / "manifest.json").read_text())["slurm"] == {"job": "17"}
    assert events(folder, "job_started") == [{"job": "17", "nodes": ["n1"], "again": False}]
    capfd.readouterr()
    assert run(folder, "run_started") == 2
    message = f"{folder.name}: has already finished; got exit code 0; continue it with tridock resume\n"
    assert capfd.readouterr().err == message
    assert (folder / "exit_code").read_text() == "0\n"


def test_a_run_that_has_saved_is_queued_again_and_continues(
    folder: Path, tmp_path: Path, answer: Answer, capfd: pytest.CaptureFixture[str]
) -> None:
    answer("scontrol", "JobState=RUNNING")
    assert run(folder, "checkpoint_saved,run_preempted") == 85
    assert requeued(tmp_path) == 1
    reason = "its time was over, and it has saved"
    assert events(folder, "job_requeued") == [{"iteration": 5, "reason": reason}]
    assert f"tridock: queued again: {reason}; it continues from iteration 5\n" in capfd.readouterr().out
    assert json.loads((folder / "argv").read_text()) == []
    manifest = folder / "checkpoints" / "iter_0000005" / "files.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    assert run(folder, "run_finished") == 0
    assert json.loads((folder / "argv").read_text()) == ["--load", str(folder / "checkpoints")]
    assert (folder / "exit_code").read_text() == "0\n"
    assert events(folder, "job_started")[1]["again"] is True


def test_a_job_is_not_queued_again_for_ever(
    folder: Path, tmp_path: Path, answer: Answer, capfd: pytest.CaptureFixture[str]
) -> None:
    answer("scontrol", "JobState=RUNNING")
    for _ in range(3):
        assert run(folder, "run_preempted") == 85
    assert requeued(tmp_path) == 2
    text = "the run has come no further than iteration 0 in 3 jobs"
    assert events(folder, "job_not_requeued") == [{"reason": text}]
    assert f"tridock: not queued again: {text}\n" in capfd.readouterr().out


def test_a_job_that_is_cancelled_is_not_queued_again(
    folder: Path, tmp_path: Path, answer: Answer, capfd: pytest.CaptureFixture[str]
) -> None:
    answer("scontrol", "JobId=17 JobState=COMPLETING")
    assert run(folder, "checkpoint_saved,run_preempted") == 85
    assert requeued(tmp_path) == 0
    text = "Slurm is ending the job (completing)"
    assert events(folder, "job_not_requeued") == [{"reason": text}]
    assert f"tridock: not queued again: {text}\n" in capfd.readouterr().out


def test_slurm_may_queue_it_again_itself(
    folder: Path, tmp_path: Path, answer: Answer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer("scontrol", "JobId=17 JobState=COMPLETING Requeue=1 Restarts=2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run(folder, "checkpoint_saved,run_preempted") == 85
    assert requeued(tmp_path) == 0
    reason = "its time was over, and it has saved"
    assert events(folder, "job_requeued") == [{"iteration": 5, "reason": reason}]
    assert events(folder, "job_not_requeued") == []
    text = f"tridock: Slurm itself has queued it again: {reason}; it continues from iteration 5\n"
    assert text in capfd.readouterr().out
    # In its second job it has been queued again twice: once more is not what has happened.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert run(folder, "run_preempted") == 85
    assert events(folder, "job_not_requeued") == [{"reason": "Slurm is ending the job (completing)"}]


def test_slurm_may_be_quicker(
    folder: Path, answer: Answer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer("scontrol", "JobState=RUNNING Restarts=0", err="Job is pending execution", code=1, only="requeue")
    states = iter([("RUNNING", False), ("PENDING", True)])
    monkeypatch.setattr(supervise, "_job_state", lambda: next(states))
    assert run(folder, "run_preempted") == 85
    assert events(folder, "job_not_requeued") == []
    assert "not queued again" not in capfd.readouterr().out


def test_a_controller_that_does_not_answer_queues_nothing_again(
    folder: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_PATIENCE_S", 0.5)
    answer("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert run(folder, "run_preempted") == 85
    reason = events(folder, "job_not_requeued")[0]["reason"]
    assert str(reason).startswith("scontrol: Slurm refuses this; got slurm_load_jobs error: Unable to contact slurm")


def test_slurm_may_not_want_to(folder: Path, answer: Answer, capfd: pytest.CaptureFixture[str]) -> None:
    answer(
        "scontrol",
        "JobState=RUNNING",
        err="Requested operation is presently disabled for job 17",
        code=1,
        only="requeue",
    )
    assert run(folder, "run_preempted") == 85
    assert "tridock: not queued again: Requested operation is presently disabled" in capfd.readouterr().out


@pytest.mark.parametrize("option", ["--no-requeue", None])
def test_what_is_not_queued_again(folder: Path, tmp_path: Path, answer: Answer, option: str | None) -> None:
    answer("scontrol", "JobState=RUNNING")
    code = run(folder, "run_preempted", option) if option else run(folder, "run_started")
    assert code == (85 if option else 4)
    assert not (tmp_path / "asked").exists()


def test_a_lost_node_is_a_reason_to_be_queued_again(folder: Path) -> None:
    (folder / "events.jsonl").write_text('{"event": "node_lost", "node": "n2"}\n')
    assert supervise._reason(folder, 4, 0, own=False) == "n2 was lost"
    assert supervise._reason(folder, 143, 0, own=False) is None
    assert supervise._reason(folder, 4, (folder / "events.jsonl").stat().st_size, own=False) is None


def test_a_request_that_is_wrong_ends_the_run(folder: Path, answer: Answer, capfd: pytest.CaptureFixture[str]) -> None:
    (folder.parent.parent / "data" / "t.idx").unlink()
    assert run(folder, "run_started") == 2
    assert ": data.data_path: is not on this machine; got data/t.idx; " in capfd.readouterr().err
    assert (folder / "exit_code").read_text() == "2\n"


def test_ranks_that_ssh_starts_have_the_jobs_environment(
    folder: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_OF_THE_SHELL", "x")
    config = str(folder.parent.parent / "t.yaml")
    command = [sys.executable, str(folder.parent.parent / "rank.py"), str(folder), "run_finished", "--launcher=pdsh"]
    assert main(["slurm", "supervise", "--config", config, "--env", "A=1", str(folder), "--", *command]) == 0
    env = dict(line.split("=", 1) for line in (folder / "deepspeed_env").read_text().splitlines())
    assert (env["NCCL_DEBUG"], env["A"]) == ("INFO", "1")
    assert {"PATH", "TRIDOCK_RUN_ID", "TRIDOCK_WORLD_SIZE"} < env.keys()
    assert "SECRET_OF_THE_SHELL" not in env
    assert f"export DS_ENV_FILE={folder}/deepspeed_env\n" in (folder / "launch.sh").read_text()


def test_outside_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert main(["slurm", "supervise", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}/x: is not a run's folder; got x; give runs/<run-id>\n"
        "tridock slurm supervise: needs a command; got nothing; write -- and the command that starts the ranks\n"
        "SLURM_JOB_ID: is not set; let Slurm run the script of tridock slurm submit\n"
        "MASTER_PORT: is not set; let Slurm run the script of tridock slurm submit\n"
    )


def test_the_experiment_of_the_file_is_that_of_a_script_that_nobody_prepared(folder: Path) -> None:
    assert run(folder, "run_started,run_finished", "--set", "train.seed=7") == 0
    assert "  seed: 7\n" in (folder / "experiment.yaml").read_text()
