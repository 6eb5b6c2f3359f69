"""`tridock resume` of a run under Slurm: an engine's in a new job, the user's own program in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.slurm.conftest import PROFILE, SINFO, Answer, Slurm
from tridock.cli import main
from tridock.contracts.checkpoints import MANIFEST, PROGRESS
from tridock.contracts.events import Event, append_event
from tridock.engines.progress import Progress
from tridock.experiment import load_experiment


@pytest.fixture
def submitted(workspace: Path, slurm: Slurm, answer: Answer) -> Path:
    """The folder of a run that job 17 has ended after iteration 9."""
    answer("sinfo", SINFO)
    answer("sbatch", "17")
    answer("squeue")
    (workspace / "site.yaml").write_text(PROFILE + "setup: [module load cuda]\n")
    code, out, err = slurm("submit", "t.yaml", "--profile", "site.yaml", "--nodes", "1")
    assert code == 0, err
    folder = Path(out.split()[-1])
    checkpoint = folder / "checkpoints" / "iter_0000009"
    checkpoint.mkdir(parents=True)
    saved = Progress.of(load_experiment(folder / "experiment.yaml"), 2, 7)
    (checkpoint / PROGRESS).write_bytes(saved.to_bytes())
    (checkpoint / MANIFEST).write_text("{}")
    append_event(folder, Event.CHECKPOINT_SAVED, iteration=9, folder=str(checkpoint))
    return folder


def asked(folder: Path) -> list[str]:
    lines = (folder.parent.parent.parent / "asked").read_text().splitlines()
    return [line for line in lines if line.startswith("sbatch --parsable")]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(["resume", *argv]) == 2
    return capsys.readouterr().err


def test_a_run_continues_in_a_new_job_with_the_request_of_the_first(
    submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--set", "train.train_iters=20", "--set", "optimizer.lr_decay_iters=9", "--detach")
    said = refused(capsys, submitted.name, *more)
    assert said.splitlines()[:2] == [f"runs/{submitted.name} would:", "  set slurm.gpu_request: none"]
    assert '  set slurm.setup: ["module load cuda"]' in said
    assert len(asked(submitted)) == 1
    assert main(["resume", submitted.name, *more, "--nodes", "2", "--slots", "1", "--yes"]) == 0
    done = capsys.readouterr()
    assert f"continues {submitted.name}\n" in done.err
    (new,) = (it for it in submitted.parent.glob("t-*") if it != submitted)
    assert f"job 17\nrun {new.name}; folder {new}\n" in done.out
    experiment = load_experiment(new / "experiment.yaml")
    assert (experiment.train.load, experiment.train.train_iters) == (f"runs/{submitted.name}/checkpoints", 20)
    then, now = (json.loads((it / "slurm.json").read_text())["request"] for it in (submitted, new))
    assert now == {**then, "nodes": 2, "gpus_per_node": 1}
    assert "module load cuda" in (new / "job.sh").read_text()


def test_a_job_that_is_not_over_and_options_of_hosts(
    submitted: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(submitted)
    assert refused(capsys, run, "--share", "--exclude", "n1") == (
        f"{run}: continues in a job of Slurm; got --exclude, --share; leave it out, or give --hosts\n"
    )
    answer("squeue", "17|PENDING|Resources|0:00|10:00|")
    todo = "wait for its end, or end it: tridock slurm cancel 17"
    assert refused(capsys, run) == f"{run}: is running or waits for nodes; got job 17; {todo}\n"
    assert len(asked(submitted)) == 1


@pytest.mark.parametrize("job_id", ["17", "17_3"])
def test_a_program_continues_in_its_folder(
    submitted: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str], job_id: str
) -> None:
    workspace = submitted.parent.parent
    (workspace / "mine").mkdir()
    (workspace / "mine" / "train.py").write_text("print('hello')")
    program: dict[str, Any] = {"name": "mine", "engine": "command", "command": ["torchrun", "train.py"], "code": "mine"}
    (workspace / "mine.yaml").write_text(json.dumps(program))
    _, out, _ = slurm("submit", "mine.yaml", "--profile", "site.yaml")
    run = Path(out.split()[-1])
    job = json.loads((run / "slurm.json").read_text())
    (run / "slurm.json").write_text(json.dumps({**job, "job_id": job_id}))
    (run / "exit_code").write_text("143\n")
    assert refused(capsys, str(run), "--set", "name=x", "--dry-run", "--yes") == (
        f"{run}: is your own program, which continues in its folder as it was submitted; got --set, --dry-run; "
        "leave it out, or begin anew: tridock run --slurm\n"
    )
    said = refused(capsys, str(run)).splitlines()
    assert "  run torchrun train.py" in said
    assert f"  submit {run}/job.sh" in said
    before = len(asked(run))
    assert main(["resume", str(run), "--yes", "--detach"]) == 0
    assert asked(run)[before:] == [f"sbatch --parsable {'--array=3 ' if '_' in job_id else ''}{run}/job.sh"]
    assert capsys.readouterr().out == f"job {job_id}\nrun {run.name}; folder {run}\n"
    assert json.loads((run / "slurm.json").read_text())["job_id"] == job_id
    (run / "exit_code").write_text("0\n")
    todo = "start it anew: tridock run --slurm"
    assert refused(capsys, str(run), "--yes") == f"{run}: has come to its end; got exit code 0; {todo}\n"
