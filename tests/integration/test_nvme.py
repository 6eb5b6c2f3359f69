"""States on NVMe with DeepSpeed's own op, in the image as an ordinary user: losses, restarts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.support import execute, give, succeed

pytestmark = pytest.mark.full  # tests/distributed/test_nvme.py has files instead of the op

EXPERIMENT = """
engine: torch
model: {num_layers: 6, hidden_size: 128, num_attention_heads: 4, seq_length: 64, vocab_size: 4096,
  hidden_dropout: 0.0, attention_dropout: 0.0}
parallel: {strategy: zero, zero_stage: 3}
batch: {micro_batch_size: 2}
data: {data_path: data/demo/stdlib_text_document}
precision: fp32
optimizer: {lr: 1.0e-3}
train: {train_iters: 6, log_interval: 1, eval_iters: 1, save: true, save_interval: 3}
"""
# Groups of a MiB, and buffers of less than the 8 MiB that a container may lock.
ZERO = {"sub_group_size": 262144, "stage3_param_persistence_threshold": 1000}
NVME = {"device": "nvme", "nvme_path": "/tmp/nvme"}
OPTIMIZER = {"offload_optimizer": NVME}
PARAM = {"offload_param": NVME | {"max_in_cpu": 0, "buffer_count": 2}}
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
RUNS: dict[str, tuple[dict[str, object], str]] = {
    "device": ({}, ""),
    "host": (ON_HOST, ""),
    "optimizer": (OPTIMIZER, ""),
    "param": (PARAM, ""),
    "optimizer2": (OPTIMIZER, "optimizer"),
    "param2": (PARAM, "param"),
    "host2": (ON_HOST, "optimizer"),
}
"""What each run offloads, and the run whose third iteration it continues."""
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "missing": ({"nvme_path": "/none"}, "cannot be written on localhost; got /none: no such file or directory"),
    "unwritable": ({"nvme_path": "/usr"}, "cannot be written on localhost; got /usr: permission denied"),
    "unlockable": ({"buffer_count": 4000}, "each rank locks 8000 MiB of localhost's memory for transfers to NVMe"),
}


def command(name: str, zero: dict[str, object], load: str = "") -> str:
    options = {"zero_optimization": {**ZERO, **zero}}
    words = f"tridock train e.yaml --nproc 2 --set name={name} --set 'deepspeed={json.dumps(options)}'"
    return f"{words} --set train.load=$(echo runs/{load}-*)/checkpoints/iter_0000003" if load else words


def test_losses_restarts_and_refusals(cpu_image: str, tmp_path: Path) -> None:
    give(tmp_path, 1000)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    lines = ["mkdir /tmp/nvme", "tridock data demo", *(command(name, *run) for name, run in RUNS.items())]
    # A run that ends leaves nothing on NVMe.
    lines.append('[ -z "$(ls -A /tmp/nvme)" ]')
    docker = ("docker", "run", "--rm", "--user", "1000:1000", "--shm-size", "1g", "--volume", f"{tmp_path}:/workspace")
    succeed(*docker, cpu_image, "bash", "-euc", "\n".join(lines))

    def losses(name: str) -> list[float]:
        (metrics,) = tmp_path.glob(f"runs/{name}-*/metrics.jsonl")
        return [line["loss"] for line in map(json.loads, metrics.read_text().splitlines()) if "split" not in line]

    assert len(losses("host")) == 6
    assert losses("optimizer") == losses("host") == pytest.approx(losses("device"), abs=1e-5, rel=0)
    assert losses("param") == losses("device")
    assert losses("optimizer2") == losses("host2") == losses("host")[3:]
    assert losses("param2") == losses("device")[3:]

    for name, (options, message) in REFUSED.items():
        line = command(name, {"offload_optimizer": NVME | options})
        done = execute(*docker, cpu_image, "bash", "-c", f"mkdir /tmp/nvme; {line}")
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr
        assert not [*tmp_path.glob(f"runs/{name}-*")]
