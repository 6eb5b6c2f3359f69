"""Faults for real, on CPU ranks, and the rule that knows each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import VOCABULARY, Started, make_data, rank_environment
from tests.patience import STEP_S, WORK_S
from tridock.contracts import heartbeat, run_folder
from tridock.node.agent.evidence import evidence
from tridock.triage import diagnose, facts_of

pytestmark = pytest.mark.distributed

# Done by two ranks without a launcher: tests/distributed/faults.py.
FAULTS = {
    "host-out-of-memory": "localhost ran out of memory; the plan expects 3.0 GiB for a rank of stage 0 "
    "(weights 2.0 GiB, activations 1.0 GiB), of the 16.0 GiB of a v100-16gb",
    "address-in-use": "the rendezvous port was taken between launch and start",
    "too-many-open-files": "the limit on open files was reached on localhost",
    "too-many-processes": "the limit on processes or threads was reached on localhost",
    "disk-full": "a disk of localhost is full",
    "missing-file": "a file is missing on localhost: {folder}/none.bin",
    "index-maps-missing": "Megatron's index maps are missing on localhost",
    "permission": "rank 0 on localhost has no permission for a file or folder: /sys/kernel/tridock",
    "checkpoint-corrupted": "a file of the checkpoint is truncated or damaged",
    "checkpoint-of-another-version": "the checkpoint holds objects that this version cannot read: "
    "another torch, DeepSpeed or Megatron wrote it",
    "checkpoint-of-another-version, distributed": "the checkpoint holds objects that this version cannot read: "
    "another torch, DeepSpeed or Megatron wrote it",
    "checkpoint-of-another-layout": "the checkpoint was saved with another number of ranks, layout or model",
    "import": "a Python package, or a name in it, is missing on localhost: tridock_none",
    "version-mismatch": "the code does not match a package: the node has another version of torch, DeepSpeed or a "
    "patch",
    "vocabulary-too-small": "the data contain a token outside the model's vocabulary",
    "no-such-interface": "localhost lacks a network interface that the environment names",
    "rendezvous": "not all ranks reached the rendezvous",
    "terminated": "rank 0 on localhost was terminated from outside the run: SIGTERM or Ctrl-C",
    "peer-lost": "a rank lost its connection to another one, which recorded no failure",
    "collective-timeout": "a collective timed out: a rank does not take part in it; "
    "rank 1 on localhost came to collective 1, the others to 2",
    "collectives-differ": "the ranks ran different collectives: a node has another version of the code, the "
    "patches or the experiment",
}
TOGETHER = ("peer-lost", "collective-timeout", "collectives-differ")
PLAN: dict[str, Any] = {
    "ranks": [{"rank": rank, "node": "localhost", "slot": rank, "pp": 0} for rank in (0, 1)],
    "memory": {
        "gpu": "v100-16gb",
        "limit_gib": 16.0,
        "stages": [
            {
                "stage": 0,
                "terms": [{"name": "activations", "bytes": 2**30}, {"name": "weights", "bytes": 2**31}],
                "total_bytes": 3 * 2**30,
            }
        ],
    },
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    argv = ["-m", "tests.distributed.faults", str(folder)]
    with Started(argv, folder, 2, {"TORCH_FR_BUFFER_SIZE": "99"}, "torch") as started:
        finished = started.wait()
    for name in FAULTS:
        assert (folder / "runs" / name).is_dir(), finished
        # Of most, the second rank has no part.
        ranks = PLAN["ranks"] if name in TOGETHER else PLAN["ranks"][:1]
        (folder / "runs" / name / run_folder.PLAN).write_text(json.dumps({**PLAN, "ranks": ranks}))
    return folder


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_known(faults: Path, name: str) -> None:
    answer = evidence(faults / "runs" / name)
    found = diagnose(facts_of({"localhost": answer}, "localhost", 4))
    assert (found.rule, found.cause) == (name.partition(",")[0], FAULTS[name].replace("{folder}", str(faults))), answer


STEPS = 5


# ---- whole runs, under the launcher and the supervisor -------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_data(folder)
    experiment = {
        "name": "t",
        "model": {
            "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": VOCABULARY,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        },
        "batch": {"micro_batch_size": 2},
        "data": {"data_path": "data/small", "split": "80,10,10"},
        "precision": "fp32",
        "optimizer": {"lr": 0.01, "lr_warmup_iters": 1},
        "train": {"train_iters": 6, "log_interval": 1, "save": False, "tensorboard": False},
    }  # fmt: skip
    (folder / "t.yaml").write_text(json.dumps(experiment))
    return folder


@contextmanager
def trained(project: Path, *fields: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-m", "tridock.cli", "train", "t.yaml", "--run-id-file", "id", "--nproc", "2"]
    arguments += [word for field in fields for word in ("--set", field)]
    (project / "id").unlink(missing_ok=True)
    with subprocess.Popen(
        arguments, cwd=project, env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT) if process.poll() is None else None


def folder_of(project: Path) -> Path:
    return project / "runs" / (project / "id").read_text().strip()


def rank_process(project: Path, rank: int) -> int:
    """The pid of a rank that has made some steps."""
    deadline = time.monotonic() + WORK_S
    while True:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        if not (project / "id").exists() or not (folder_of(project) / run_folder.METRICS).exists():
            continue
        if (folder_of(project) / run_folder.METRICS).read_text().count("\n") < STEPS:
            continue
        beat = heartbeat.read(folder_of(project), rank)
        assert beat is not None
        return beat.pid


def lines_of(error: str) -> dict[str, str]:
    """The report's lines by their names, and the first line, whole, as ``""``."""
    lines = error.splitlines()
    start = next(number for number, line in enumerate(lines) if ": the run failed; got " in line)
    return {"": lines[start], **{line.split()[0]: line[11:] for line in lines[start + 1 :]}}


def test_a_loss_that_is_no_number(project: Path) -> None:
    """And the same text again, by the run's folder alone."""
    with trained(project, "optimizer.lr=1e30", "optimizer.clip_grad=0.0") as process:
        _, error = process.communicate(timeout=WORK_S)
    folder = folder_of(project)
    found = lines_of(error)
    assert re.fullmatch(
        rf"{folder.name}: the run failed; got exit code 4, every rank: iteration \d: the loss is not finite; "
        rf"look at {folder}/logs/rank-0.log",
        found[""],
    )
    assert re.fullmatch(r"every rank, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", found["first"])
    assert re.fullmatch(r"1: 4\.\d{4}, (?:\d: [\d.]+, )*\d: not finite", found["steps"])
    assert found["cause"] == "the training diverged: the loss is not finite"
    assert found["remedy"].startswith("lower optimizer.lr, ")
    assert found["rule"] == "loss-not-finite (docs/triage.md)"
    again = subprocess.run(
        [sys.executable, "-m", "tridock.cli", "triage", str(folder)],
        env=rank_environment(), capture_output=True, text=True, timeout=STEP_S, check=False,
    )  # fmt: skip
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == error[error.index(found[""]) :]


@pytest.mark.parametrize(
    ("number", "rule", "cause"),
    [
        (signal.SIGKILL, "exited-without-message",
         "rank 1 on localhost exited without a message: a signal from outside, or a fault in native code"),
        pytest.param(
            signal.SIGSTOP, "rank-stopped",
            "rank 1 on localhost was stopped by a signal (SIGSTOP) or is held by a debugger",
            marks=pytest.mark.full,  # tests/unit/node/test_verdict.py
        ),
    ],
)  # fmt: skip
def test_a_signal(project: Path, number: signal.Signals, rule: str, cause: str) -> None:
    # A rank that is killed needs none, and a busy machine may let one stand still for that long.
    limit = ["launch.hang_timeout=3"] if number is signal.SIGSTOP else []
    with trained(project, "train.train_iters=1000000", *limit) as process:
        os.kill(rank_process(project, 1), number)
        _, error = process.communicate(timeout=WORK_S)
    assert process.returncode == 4, error
    found = lines_of(error)
    assert (found["rule"], found["cause"]) == (f"{rule} (docs/triage.md)", cause)
    assert found["first"].startswith("rank 1 on localhost, 20")
    assert len(found["steps"].split(", ")) == STEPS
