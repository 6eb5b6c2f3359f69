"""`tridock slurm` with stand-ins for Slurm's commands: their arguments, and the messages to the user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.ops.slurm.conftest import SINFO, START, Answer, Slurm
from tridock.ops.slurm import scheduler

ROOT = Path(__file__).parents[4]
SUBMIT = ("submit", "t.yaml", "--profile", "site.yaml")


def submitted(workspace: Path, slurm: Slurm, answer: Answer) -> Path:
    """A run that Slurm has taken as job 17."""
    answer("sinfo", SINFO)
    answer("sbatch", "17")
    assert slurm(*SUBMIT)[0] == 0
    (folder,) = (path for path in (workspace / "runs").iterdir() if path.is_dir())
    return folder


def test_a_job_that_is_submitted(slurm: Slurm, workspace: Path, tmp_path: Path, answer: Answer) -> None:
    answer("sinfo", SINFO)
    answer("sbatch", "17;cluster", START)
    code, out, err = slurm(*SUBMIT, "--nodes", "2", "--set", "train.seed=7")
    assert (code, err) == (0, f"{START.removeprefix('sbatch: ')}\n")
    (folder,) = (path for path in (workspace / "runs").iterdir())
    assert out == f"job 17\nrun {folder.name}; folder {folder}\n"
    script = (folder / "job.sh").read_text()
    assert f"#SBATCH --output={folder}/logs/slurm-%j.out\n" in script
    assert (folder / "logs").is_dir()
    assert "seed: 7\n" in (folder / "experiment.yaml").read_text()
    assert json.loads((folder / "plan.json").read_text())["world_size"] == 4
    job = json.loads((folder / "slurm.json").read_text())
    assert job["job_id"] == "17"
    assert job["request"] == {
        "nodes": 2, "gpus_per_node": 2, "gpu_request": "none", "time": "10", "signal_lead": 60
    }  # fmt: skip
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[:2] for line in asked] == [
        ["sinfo", "--noheader"], ["sbatch", "--test-only"], ["sbatch", "--parsable"],
    ]  # fmt: skip
    assert asked[2] == f"sbatch --parsable {folder}/job.sh"


def test_an_array_is_a_run_a_value(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    answer("sinfo", SINFO)
    answer("sbatch", "17")
    code, out, err = slurm(*SUBMIT, "--sweep", "optimizer.lr=1e-3,3e-4", "--sweep", "train.seed=[1, 2]", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["version"], found["job"]) == (1, "17")
    folders = [Path(run["folder"]) for run in found["runs"]]
    assert [run["run_id"] for run in found["runs"]] == [folder.name for folder in folders]
    found = [re.findall(r"(?: lr|seed): (.+)", (folder / "experiment.yaml").read_text()) for folder in folders]
    assert found == [["0.001", "1"], ["0.001", "2"], ["0.0003", "1"], ["0.0003", "2"]]
    ids = [json.loads((folder / "slurm.json").read_text())["job_id"] for folder in folders]
    assert ids == ["17_0", "17_1", "17_2", "17_3"]
    assert (folders[3] / "program").read_text() == f"tridock.train\n--run-folder\n{folders[3]}\n"
    assert "#SBATCH --array=0-3\n" in (folders[0] / "job.sh").read_text()


def test_all_that_is_wrong_is_said_at_once(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    answer("sinfo", SINFO)
    answer("sbatch", err="allocation failure: Requested node configuration is not available", code=1)
    (workspace / "data" / "t.bin").unlink()
    assert slurm(*SUBMIT, "--nodes", "3") == (
        2,
        "",
        f"t.yaml: data.data_path: is not on this machine; got data/t.bin; "
        f"copy it into {workspace}, or make it: tridock data\n"
        "sbatch: Slurm refuses the job; got allocation failure: Requested node configuration is not available; "
        "correct the request; sinfo shows what the cluster has\n",
    )
    assert list((workspace / "runs").iterdir()) == []


def test_an_experiment_that_cannot_be_is_refused_before_slurm_is_asked(
    slurm: Slurm, workspace: Path, tmp_path: Path, answer: Answer
) -> None:
    answer("sinfo", SINFO)
    assert slurm(*SUBMIT, "--set", "batch.global_batch_size=3")[::2] == (
        2, "t.yaml: batch.global_batch_size: must be a multiple of micro_batch_size 1 x data parallel size 2; "
        "got 3; use 2 or 4, or leave it out\n",
    )  # fmt: skip
    assert "sbatch" not in (tmp_path / "asked").read_text()


def test_the_plan_is_compared_with_the_nodes_gpus(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    answer("sinfo", "gpu*|gpu:v100:2|v100-16g|infinite|1-infinite")
    fields = ["model.num_layers=80", "model.hidden_size=8192", "model.num_attention_heads=64", "precision=fp16"]
    arguments = [word for field in fields for word in ("--set", field)]
    code, _, err = slurm(*SUBMIT, *arguments)
    assert code == 2
    assert re.fullmatch(
        r"t\.yaml: a rank of stage 0 needs more memory than the 15\.8 GiB of a v100-16gb; got [\d.]+ GiB; "
        r"see `tridock plan --search` for layouts that fit, or start it all the same with --force\n", err,
    )  # fmt: skip


@pytest.mark.parametrize(("gres", "is_known"), [("a100", False), ("a100-80gb", True), ("some_new_gpu", False)])
def test_a_gpu_that_slurm_does_not_name_is_said(
    slurm: Slurm, workspace: Path, answer: Answer, gres: str, *, is_known: bool
) -> None:
    answer("sinfo", f"gpu*|gpu:{gres}:2|(null)|infinite|1-infinite")
    answer("sbatch", "17")
    (workspace / "site.yaml").write_text("gpus_per_node: 2\ntime: '10'\nsignal_lead: 60\n")
    said = "memory was not compared with the plan: Slurm names no GPU that Tridock knows; set gpu: in the profile\n"
    assert slurm(*SUBMIT)[::2] == (0, "" if is_known else said)


def test_slurm_may_refuse_at_last(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    answer("sinfo", SINFO)
    error = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    answer("sbatch", err=error, code=1, only="parsable")
    assert slurm(*SUBMIT) == (
        2, "", "sbatch: Slurm refuses the job; got Batch job submission failed: Invalid account or account/partition "
        "combination specified; correct the request; sinfo shows what the cluster has\n",
    )  # fmt: skip
    assert list((workspace / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "train.seed"],
         "--sweep: must be a field's path, =, and values; got 'train.seed'; write for example optimizer.lr=1e-3,3e-4"),
        (["--workspace", "nowhere"],
         "--workspace: is not a folder; got {0}/nowhere; "
         "give the folder that holds data/, on a file system that all nodes share"),
        (["--workspace", "a b"],
         "--workspace: has a character that sbatch or a launcher would take for its own; got {0}/a b; "
         "use a folder whose path has only letters, digits and . / @ + = , - _"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(
    slurm: Slurm, workspace: Path, answer: Answer, arguments: list[str], message: str
) -> None:
    (workspace / "a b").mkdir()
    assert slurm("render", "t.yaml", "--gpus-per-node", "1", *arguments) == (
        2, "", message.format(workspace) + "\n",
    )  # fmt: skip


def test_without_slurm(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    assert slurm(*SUBMIT) == (3, "", "sbatch: is not on this machine; run it where Slurm's commands are\n")
    assert slurm("run", "t.yaml", "--gpus-per-node", "1") == (
        2, "", "tridock slurm run: is for a shell inside an allocation; got no SLURM_JOB_ID; "
        "begin with salloc --nodes=… --gres=gpu:…, or use tridock slurm submit\n",
    )  # fmt: skip


def test_the_allocations_options_count(
    slurm: Slurm, workspace: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    answer("scontrol", "JobId=17 NumNodes=2 TresPerNode=gres:gpu:v100:4 Partition=debug")
    assert slurm("run", "t.yaml", "--nodes", "3") == (
        2, "", "--nodes: is not the allocation's, 2; got 3; leave --nodes out\n",
    )  # fmt: skip
    assert slurm("run", "t.yaml", "--sweep", "train.seed=1,2") == (
        2, "", "tridock slurm run: is for a single run; got 2 runs; give one CONFIG, or use tridock slurm submit\n",
    )  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    answer("tridock", "the supervisor")
    # It becomes its script.
    argv = [sys.executable, "-m", "tridock.cli", "slurm", "run", "t.yaml", "--cpus-per-node", "4"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{os.environ['PATH'].split(':')[0]}:/usr/bin:/bin"}
    done = subprocess.run(argv, cwd=workspace, env=env, capture_output=True, text=True, timeout=STEP_S, check=False)
    (folder,) = (workspace / "runs").iterdir()
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert done.stdout.splitlines() == [f"run {folder.name}; folder {folder}", "the supervisor"]
    assert json.loads((folder / "plan.json").read_text())["world_size"] == 8
    assert "SLURM_CPUS_PER_TASK" not in (folder / "job.sh").read_text()


# ---- afterwards ----------------------------------------------------------------------------------


def rows(slurm: Slurm) -> list[dict[str, object]]:
    code, out, err = slurm("status", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["version"] == 1
    return list(found["runs"])


def test_status_of_a_job_that_waits_runs_and_has_ended(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    folder = submitted(workspace, slurm, answer)
    answer("squeue", "17|PENDING|Resources|0:00|10:00|\n18|RUNNING|None|1:00|10:00|n1")
    (row,) = rows(slurm)
    assert (row["run"], row["job"], row["state"], row["reason"]) == (folder.name, "17", "pending", "Resources")
    answer("squeue", "17|RUNNING|None|1:00|10:00|n[1-2]")
    (folder / "metrics.jsonl").write_text('{"iteration": 4, "loss": 2.5}\n')
    (row,) = rows(slurm)
    assert (row["state"], row["nodes"], row["elapsed"], row["limit"]) == ("running", "n[1-2]", "1:00", "10:00")
    assert (row["iteration"], row["train_iters"], row["loss"]) == (4, 9, 2.5)
    shown = slurm("status")[1]
    assert re.search(rf"{folder.name} +│ +17 +│ +running +│ +n\[1-2\] +│ +1:00 of 10:00 +│ +4/9 +│ +2\.5000", shown)
    answer("squeue")
    for code, state in ((0, "done"), (4, "failed"), (85, "preempted"), (143, "stopped")):
        (folder / "exit_code").write_text(f"{code}\n")
        (row,) = rows(slurm)
        assert (row["state"], row["exit_code"]) == (state, code)
    (folder / "exit_code").write_text("4\n")
    assert re.search(r"│ failed \(exit code 4\) +│", slurm("status")[1])


def test_a_job_that_left_no_word_is_what_accounting_says(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    submitted(workspace, slurm, answer)
    answer("squeue")
    assert rows(slurm)[0]["state"] == "gone"
    answer("sacct", "TIMEOUT")
    assert rows(slurm)[0]["state"] == "timeout"
    answer("sacct", err="Slurm accounting storage is disabled", code=1)
    assert rows(slurm)[0]["state"] == "gone"


def test_logs(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    folder = submitted(workspace, slurm, answer)
    answer("squeue", "17|PENDING|Resources|0:00|10:00|")
    assert slurm("logs") == (
        2, "", f"{folder}/logs/launcher.log: is not there; got job 17 is pending (Resources); "
        "wait for its start, with --follow\n",
    )  # fmt: skip
    answer("squeue")
    assert slurm("logs", "17", "--rank", "3") == (
        2, "", f"{folder}/logs/rank-3.log: is not there; got job 17 has ended; wait for its start, with --follow\n",
    )  # fmt: skip
    (folder / "logs" / "launcher.log").write_text("all\n")
    (folder / "logs" / "rank-3.log").write_text("three\n")
    (folder / "exit_code").write_text("4\n")
    assert slurm("logs") == (4, "all\n", "")
    assert slurm("logs", folder.name, "--rank", "3", "--follow") == (4, "three\n", "")
    (folder / "exit_code").unlink()
    answer("sacct", "NODE_FAIL")
    assert slurm("logs", "--follow")[::2] == (
        4, f"{folder.name}: has ended without an exit code; got node_fail; "
        f"look at Slurm's own output in {folder}/logs\n",
    )  # fmt: skip
    assert slurm("logs", "16") == (
        2, "", "RUN: is not a submitted run; got '16'; see tridock slurm status\n",
    )  # fmt: skip


def test_a_folder_whose_job_is_no_number_is_no_submitted_run(slurm: Slurm, workspace: Path, tmp_path: Path) -> None:
    """A fetched run beside yours: its job would become an argument of scancel."""
    for number, text in enumerate(('{"job_id": "--user=ada"}', '{"job_id": "17 18"}', "{}", "[", "[]")):
        folder = workspace / "runs" / f"theirs-{number}"
        folder.mkdir(parents=True)
        (folder / "slurm.json").write_text(text)
    code, _, err = slurm("cancel")
    assert (code, err) == (
        2,
        "RUN: is not a submitted run; got none was submitted from here; see tridock slurm status\n",
    )
    assert not (tmp_path / "asked").exists()


def test_cancel(slurm: Slurm, workspace: Path, tmp_path: Path, answer: Answer) -> None:
    assert slurm("cancel") == (
        2, "", "RUN: is not a submitted run; got none was submitted from here; see tridock slurm status\n",
    )  # fmt: skip
    folder = submitted(workspace, slurm, answer)
    answer("squeue", "17|PENDING|Resources|0:00|10:00|")
    answer("scancel")
    assert slurm("cancel") == (0, f"cancelled job 17, run {folder.name}\n", "")
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "scancel 17"
    assert (folder / ".stopped").exists()
    assert (folder / "exit_code").read_text() == "143\n"
    answer("squeue")
    assert slurm("cancel") == (
        2, "", f"{folder.name}: has ended already; got exit code 143; see tridock slurm status\n",
    )  # fmt: skip


def test_a_controller_that_does_not_answer(slurm: Slurm, workspace: Path, answer: Answer) -> None:
    answer("squeue", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", code=1)
    assert slurm("status") == (
        3, "", "squeue: Slurm refuses this; got slurm_load_jobs error: Unable to contact slurm controller "
        "(connect failure); see whether Slurm's controller answers: scontrol ping\n",
    )  # fmt: skip


def test_a_command_that_hangs(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    answer("scancel")
    monkeypatch.setattr(scheduler, "_TIMEOUT_S", 0.0)
    with pytest.raises(scheduler.ClusterError) as caught:
        scheduler.cancel("1")
    assert str(caught.value) == (
        "scancel: does not answer; got nothing for 0 s; see whether Slurm's controller answers: scontrol ping"
    )
