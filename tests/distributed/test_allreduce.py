"""The doctor's all-reduce on a node that is slow, and on one whose image is for GPUs that torch cannot use."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, free_port, rank_environment

pytestmark = pytest.mark.distributed

# What stands before torch on the path: a disk that takes its time.
SLOW_DISK = """
import sys, time
time.sleep(float({seconds}))
sys.path.remove({folder!r})
del sys.modules["torch"]
import torch
"""


@pytest.mark.parametrize(("seconds", "limit"), [(0, 15), pytest.param(20, 60, marks=pytest.mark.full)])
def test_a_node_whose_partner_does_not_come(tmp_path: Path, seconds: int, limit: int) -> None:
    (tmp_path / "torch.py").write_text(SLOW_DISK.format(seconds=seconds, folder=str(tmp_path)))
    world = base64.urlsafe_b64encode(json.dumps({"a": [0], "b": [0]}).encode()).decode()
    arguments = ["--world", world, "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    env = rank_environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "DS_ACCELERATOR": "cpu"}
    argv = [sys.executable, "-m", "tridock.train.allreduce", *arguments, "--limit", str(limit)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert said["rank"] == 0
    found = re.fullmatch(r"Timed out after \d+ seconds waiting for clients\. 1/2 clients joined\.(.*)", said["error"])
    assert found, said
    if seconds:
        slow = rf" \(to load torch took \d+ of {limit} s: its processors or its disk are busy\)"
        assert re.fullmatch(slow, found[1])


def test_an_image_for_gpus_does_not_pass_on_the_cpu() -> None:
    world = base64.urlsafe_b64encode(json.dumps({"a": [0]}).encode()).decode()
    arguments = ["--world", world, "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    env = rank_environment() | {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", "tridock.train.allreduce", *arguments, "--limit", "60"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    said = json.loads(done.stdout)
    assert said["error"].startswith("device: torch has no GPU for local rank 0; got "), said
    assert "CUDA_VISIBLE_DEVICES=''" in said["error"]
