"""``torchrun -m tridock.train`` without a run's folder, as PyTorch's data parallel benchmark is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, events, losses, make_data, rank_environment, run_several
from tests.distributed.ranks import make_run as make_other
from tests.patience import STEP_S
from tridock.experiment import load_experiment

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
FIELDS = {"train.train_iters": 4, "batch.micro_batch_size": 2}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    make_data(folder)
    (make_other(folder, "given", 1, **FIELDS) / "experiment.yaml").rename(folder / "given.yaml")
    return folder


def benchmark(workspace: Path, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """By the script itself, as the container has it."""
    command = [str(ROOT / "entrypoint/ptd_benchmark.sh"), f"--nproc_per_node={processes}", *arguments]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = rank_environment() | {"PATH": path, "TRIDOCK_EXPERIMENT": "given.yaml"}
    return subprocess.run(command, env=env, cwd=workspace, capture_output=True, text=True, timeout=STEP_S, check=False)


def folder_of(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(next(line for line in done.stdout.splitlines() if line.startswith("run ")).rpartition("folder ")[2])


def test_ddp_and_a_pipeline_have_the_losses_of_one_process(workspace: Path) -> None:
    alone = make_other(workspace, "alone", 1, **FIELDS)
    run_several([alone], 1)
    ddp = folder_of(benchmark(workspace))
    pipeline = folder_of(benchmark(workspace, "--mode=pdp", "--ndevice_per_proc=2", processes=1))
    for folder, strategy, stages in ((ddp, "ddp", 1), (pipeline, "ddp", 2)):
        parallel = load_experiment(folder / "experiment.yaml").parallel
        assert (parallel.strategy, parallel.pipeline_model_parallel_size) == (strategy, stages)
        assert losses(folder) == pytest.approx(losses(alone), abs=TOLERANCE, rel=0)
        assert events(folder)[-1] == "run_finished"
        assert (folder / "plan.json").is_file()


@pytest.mark.full
def test_without_a_mode_the_experiments_strategy_holds(workspace: Path) -> None:
    done = benchmark(workspace, "--set", "parallel.strategy=fsdp")
    assert load_experiment(folder_of(done) / "experiment.yaml").parallel.strategy == "fsdp"


def test_a_strategy_that_torchrun_cannot_start_is_refused(workspace: Path) -> None:
    refused = benchmark(workspace, "--set", "parallel={strategy: zero, zero_stage: 1}")
    assert refused.returncode != 0
    said = (
        "given.yaml: parallel.strategy: is not for torchrun, under which DeepSpeed has no settings; got zero; "
        "give --mode, or start it with tridock train or tridock launch"
    )
    assert [line for line in refused.stderr.splitlines() if line.startswith("given.yaml")] == [said]


def test_what_the_planner_refuses_is_said_once_and_no_run_is_left(workspace: Path) -> None:
    before = set((workspace / "runs").iterdir())
    done = benchmark(
        workspace, "--mode=tp", "--ndevice_per_proc=2", "--set", "model.num_attention_heads=1", processes=1
    )
    assert done.returncode != 0
    said = "given.yaml: parallel.tensor_model_parallel_size: must divide num_attention_heads 1; got 2; use 1"
    assert [line for line in done.stderr.splitlines() if line.startswith("given.yaml")] == [said]
    assert set((workspace / "runs").iterdir()) == before
