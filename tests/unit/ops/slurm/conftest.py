"""A workspace with an experiment and its data, and stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dataset_writer import IndexedDatasetWriter
from tridock.cli import main

EXPERIMENT = {
    "name": "t",
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 16, "vocab_size": 7},
    "batch": {"micro_batch_size": 1},
    "data": {"data_path": "data/t"},
    "precision": "fp32",
    "train": {"train_iters": 9},
}
PROFILE = "gpus_per_node: 2\ngpu_request: none\ntime: '10'\nsignal_lead: 60\n"
SINFO = "debug*|(null)|(null)|1:00:00|1-infinite"
START = "sbatch: Job 17 to start at 2026-11-27T10:00:00 using 4 processors on nodes n[1-2] in partition debug"

Answer = Callable[..., None]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Makes a command of Slurm's say something; what it was asked comes into ``asked``."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    # Nothing of a real Slurm's may be asked.
    monkeypatch.setenv("PATH", f"{bin_}:{Path(sys.executable).parent}:/usr/bin:/bin")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def make(command: str, out: str = "", err: str = "", code: int = 0, only: str = "") -> None:
        script = f'#!/bin/sh\necho "{command} $*" >>"{tmp_path}/asked"\n'
        if only:  # for one option alone
            script += f'case "$*" in *{only}*) ;; *) echo "{out or 17}"; exit 0;; esac\n'
        script += f"cat <<'END'\n{out}\nEND\ncat >&2 <<'END'\n{err}\nEND\nexit {code}\n"
        (bin_ / command).write_text(script)
        (bin_ / command).chmod(0o755)

    return make


def begin_job(workspace: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the run's folder of job 17, which this process is in, on its only node."""
    # Of this process: what is left of a run is ended, also where another worker's test has it.
    made = workspace / "runs" / f"{name}-20260102-030405-{os.getpid() & 0xFFFF:04x}"
    made.mkdir(parents=True)
    (made / "hostfile").write_text("n1 slots=1\n")
    for variable, value in {"SLURM_JOB_ID": "17", "MASTER_PORT": "20017", "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(variable, value)
    return made


def events(folder: Path, name: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in event.items() if k not in ("time", "event")} for event in found if event["event"] == name]


def requeued(tmp_path: Path) -> int:
    asked = tmp_path / "asked"
    return asked.read_text().splitlines().count("scontrol requeue 17") if asked.exists() else 0


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "t.yaml").write_text(json.dumps(EXPERIMENT))
    (folder / "site.yaml").write_text(PROFILE)
    with IndexedDatasetWriter(folder / "data" / "t", 7) as writer:
        writer.add_document(list(range(7)) * 40)
    return folder


Slurm = Callable[..., tuple[int, str, str]]


@pytest.fixture
def slurm(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Slurm:
    """`tridock slurm …` in the workspace: exit code, output, messages."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["slurm", *arguments])
        return code, *capsys.readouterr()

    return call
