"""A disk that is full or read-only for a while costs a run checkpoints, and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.ranks import VOCABULARY, free_port, make_data, rank_environment, read_lines
from tests.patience import WORK_S
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.run_state import exit_code_of

pytestmark = pytest.mark.distributed
EXPERIMENT = {
    "name": "t",
    "model": {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": VOCABULARY,
    },
    "batch": {"micro_batch_size": 2},
    "data": {"data_path": "data/small", "split": "80,10,10"},
    "precision": "fp32",
    "optimizer": {"lr": 0.01, "lr_warmup_iters": 1},
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A runs folder on a disk of its own, of 24 MiB."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs takes root: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """While whatever opens a file there to write it finds a read-only file system; open files are not affected."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def reached(run: Path) -> int:
    """The last iteration by the heartbeats, which take no room."""
    beat = heartbeat.read(run, 0)
    return beat.iteration if beat is not None else 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WORK_S
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_a_disk_that_is_full_and_then_read_only_for_a_while(tmp_path: Path, runs: Path) -> None:
    make_data(tmp_path)
    (tmp_path / "t.yaml").write_text(json.dumps(EXPERIMENT))
    fields = {
        "launch.master_port": free_port(), "train.train_iters": 10**6, "train.log_interval": 1,
        "train.save_interval": 20, "train.keep_checkpoints": 2,
    }  # fmt: skip
    argv = [sys.executable, "-m", "tridock.cli", "train", "t.yaml", "--run-id-file", "id", "--nproc", "2"]
    argv += [word for name, value in fields.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, env=rank_environment(), stdout=pipe, stderr=pipe, text=True) as process:
        wait_until(lambda: (tmp_path / "id").exists(), process)
        run = runs / (tmp_path / "id").read_text().strip()
        wait_until(lambda: any(run.glob("checkpoints/iter_*/files.json")), process)
        fill(runs / "filler")
        first = reached(run)
        wait_until(lambda: reached(run) > first + 60, process)
        (runs / "filler").unlink()
        freed = reached(run)
        wait_until(lambda: reached(run) > freed + 60, process)
        with read_only(runs):
            first = reached(run)
            wait_until(lambda: reached(run) > first + 60, process)
            assert process.poll() is None
        process.send_signal(signal.SIGUSR1)  # it saves, and ends
        output, errors = process.communicate(timeout=WORK_S)
    assert process.returncode == 85, output + errors
    assert exit_code_of(run) == 85
    for name in (run_folder.METRICS, run_folder.EVENTS):
        assert all(json.loads(line) for line in (run / name).read_text().splitlines())
    logged = [line["iteration"] for line in read_lines(run / run_folder.METRICS) if "split" not in line]
    events = read_lines(run / run_folder.EVENTS)
    reasons = [event["reason"] for event in events if event["event"] == "checkpoint_failed"]
    assert "read-only file system" in str(reasons).lower()
    assert events[-1]["event"] == "run_preempted"
    last = events[-1]["iteration"]
    assert logged == list(range(1, last + 1))
    assert (run / "checkpoints" / "latest").read_text() == f"iter_{last:07d}"
    assert "bytes did not fit on the disk]" in (run / run_folder.rank_log(0)).read_text()
