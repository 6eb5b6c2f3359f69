"""``tridock calibrate`` on this machine's CPU, and a plan that uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import make_data, make_run, rank_environment

pytestmark = pytest.mark.distributed


def tridock(folder: Path, *arguments: str) -> str:
    argv = [sys.executable, "-m", "tridock.cli", *arguments]
    done = subprocess.run(argv, cwd=folder, env=rank_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_a_plan_takes_its_times_from_what_was_measured(tmp_path: Path) -> None:
    text = tridock(tmp_path, "calibrate", "--nproc", "2", "--output", "cpu.json")
    assert text.startswith("cpu, 2 ranks at the same time\n")
    assert text.endswith("written to cpu.json\n")
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert {one["precision"] for one in found["products"]} == {"fp32", "bf16"}
    assert [one["bytes"] for one in found["sums"]] == [256 << 10, 16 << 20]
    make_data(tmp_path)
    wide = {"model.num_layers": 4, "model.hidden_size": 256, "model.num_attention_heads": 4, "model.seq_length": 128}
    folder = make_run(tmp_path, "wide", 2, **wide, **{"batch.micro_batch_size": 4, "batch.global_batch_size": 8})
    (folder / "experiment.yaml").rename(tmp_path / "wide.yaml")
    folder.rmdir()
    where = ("plan", "wide.yaml", "--nodes", "1", "--gpus-per-node", "2", "--json")
    assert json.loads(tridock(tmp_path, *where))["cost"]["estimate"] is None
    cost = json.loads(tridock(tmp_path, *where, "--calibration", "cpu.json"))["cost"]
    assert cost["rates"]["tflops_source"] == "measured: cpu.json"
    tridock(tmp_path, "train", "wide.yaml", "--nproc", "2")
    (run,) = (tmp_path / "runs").iterdir()
    again = ("plan", "--from-run", str(run), "--calibration", "cpu.json", "--json")
    compared = json.loads(tridock(tmp_path, *again))["from_run"]["seconds"]
    assert compared["planned"] == pytest.approx(cost["estimate"]["iteration"])
    # The same units; how exact it is depends on what else computes here, once or the other time.
    assert 1 / 30 < compared["measured"] / compared["planned"] < 30


def test_ranks_that_fail_are_named(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tridock.cli", "calibrate", "--nproc", "1"]
    env = rank_environment() | {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("this machine: the calibration failed; got rank 0: device: torch has no GPU")
    assert not (tmp_path / "calibration.json").exists()
