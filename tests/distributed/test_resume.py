"""`tridock resume` on this machine: the losses are those of a run that was never interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import losses, make_data, make_run, metrics, rank_environment, run_several
from tests.distributed.test_local_disks import ENGINES
from tests.patience import WORK_S
from tridock.contracts.run_folder import is_run_id

pytestmark = pytest.mark.distributed


def tridock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tridock.cli", *arguments]
    return subprocess.run(
        argv, cwd=folder, env=rank_environment(), capture_output=True, text=True, check=False, timeout=WORK_S
    )


def test_a_run_that_has_ended_early_is_continued_to_its_end(tmp_path: Path) -> None:
    make_data(tmp_path)
    made = make_run(tmp_path, "unused", 1, **{"train.save": True, "batch.global_batch_size": 8})
    (made / "experiment.yaml").rename(tmp_path / "e.yaml")
    made.rmdir()
    schedule = "--set=optimizer.lr_decay_iters=8"
    runs = [tmp_path / name for name in ("whole", "half", "rest")]
    for file, more in zip(runs, ((), ("--set=train.train_iters=4",)), strict=False):
        done = tridock(tmp_path, "train", "e.yaml", "--nproc", "1", schedule, f"--run-id-file={file}", *more)
        assert done.returncode == 0, done.stdout + done.stderr
    whole, half = (tmp_path / "runs" / file.read_text().strip() for file in runs[:2])
    done = tridock(tmp_path, "resume", f"runs/{half.name}")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        f"train.train_iters: {half.name} has come to its end; got 4 iterations; give more: --set train.train_iters=8",
    )
    load = f"train.load=runs/{half.name}/checkpoints"
    argv = ("train", "e.yaml", "--nproc", "1", schedule, "--set", load, "--set", "batch.global_batch_size=16")
    done = tridock(tmp_path, *argv)
    choice = "train.override_checkpoint=[batch.global_batch_size]"
    assert (done.returncode, done.stderr.splitlines()[1:]) == (  # after a warning about the tokenizer
        2,
        [f"e.yaml: batch.global_batch_size: the checkpoint runs/{half.name}/checkpoints was saved with 8; got 16; "
        f"use the same, or choose the new values: --set '{choice}'"],
    )  # fmt: skip
    assert {path.name for path in (tmp_path / "runs").iterdir() if is_run_id(path.name)} == {whole.name, half.name}
    done = tridock(tmp_path, *argv, "--set", choice, f"--run-id-file={runs[2]}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = metrics(tmp_path / "runs" / runs[2].read_text().strip())
    seen = [it["consumed_samples"] for (_, split), it in records.items() if split == "train"]
    assert seen == [48, 64, 80, 96]  # after the 32 of the first half
    more = ("--set", "train.train_iters=8", f"--run-id-file={runs[2]}")
    done = tridock(tmp_path, "resume", f"runs/{half.name}", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.train_iters: 8 (it was 4)" in done.stdout
    rest = tmp_path / "runs" / runs[2].read_text().strip()
    assert losses(rest) == {place: loss for place, loss in losses(whole).items() if place[0] > 4}


CHOSEN = {"optimizer.weight_decay": 0.5, "optimizer.adam_beta1": 0.5, "optimizer.clip_grad": 0.01}
NAMES = ("ddp", "zero2", "zero3", "fsdp", "megatron-core", "megatron-core-optimizer")


def test_what_is_chosen_takes_effect(tmp_path: Path) -> None:
    """The checkpoint's optimizer comes with its own settings. Of torch, all strategies continue alike."""
    make_data(tmp_path)
    found = {}
    for engine in ("torch", "megatron-core"):
        folders = {}
        for name in (it for it in NAMES if it.startswith("megatron") == (engine != "torch")):
            load = {"train.load": f"runs/{name}-saved/checkpoints/iter_0000004"}
            for kind, fields in {
                "saved": {"train.save": True, "train.save_interval": 4},
                "chosen": {**load, **CHOSEN, "train.override_checkpoint": [*CHOSEN]},
            }.items():
                folders[name, kind] = make_run(tmp_path, f"{name}-{kind}", 2, **ENGINES[name], **fields)
        run_several(list(folders.values()), 2)
        found |= {key: {place: it for place, it in losses(run).items() if place[0] > 5} for key, run in folders.items()}
    for name in NAMES:
        assert found[name, "chosen"] != pytest.approx(found[name, "saved"], rel=1e-3), name
        first = "ddp" if not name.startswith("megatron") else "megatron-core"
        assert found[name, "chosen"] == pytest.approx(found[first, "chosen"], abs=2e-5), name
