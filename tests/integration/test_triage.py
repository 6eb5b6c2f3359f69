"""Faults that take a container: the kernel's own end of a process that has too much memory, a small /dev/shm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.rack import TINY, write_data
from tests.integration.support import Containers, execute
from tridock.triage import diagnose
from tridock.triage.facts import Facts


def test_the_kernel_kills(containers: Containers, tmp_path: Path) -> None:
    """A model that the container's memory does not hold: 20 bytes for each of 100 M parameters in 1 GB."""
    write_data(tmp_path / "data" / "tiny")
    model = {**TINY["model"], "num_layers": 32, "hidden_size": 512}  # type: ignore[dict-item]
    train = {**TINY["train"], "save": False, "tensorboard": False}  # type: ignore[dict-item]
    (tmp_path / "large.yaml").write_text(json.dumps({**TINY, "parallel": {}, "model": model, "train": train}))
    options = ["--memory", "1g", "--memory-swap", "1g", "--volume", f"{tmp_path}:/workspace"]
    done = containers.run("tridock", "train", "large.yaml", "--nproc", "1", options=options)
    assert done.returncode == 4, done.stdout + done.stderr
    lines = done.stderr.splitlines()[-6:]
    assert lines[0].startswith("  first    rank 0 on localhost, 20")
    assert lines[1:3] == [
        "  error    was killed by the kernel, out of memory before its first step",
        "  steps    none was logged",
    ]
    assert lines[3].startswith(
        "  cause    localhost ran out of memory, and the kernel killed the rank; the plan expects "
    )
    assert lines[5] == "  rule     oom-killed (docs/triage.md)"


LOADER = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, number): return torch.zeros(1 << 20)
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    pass
"""


@pytest.mark.full  # tests/unit/ops/checks/test_limits.py
def test_shared_memory_too_small(containers: Containers) -> None:
    """With Docker's option for it; a data loader's workers, as Megatron's, hand their samples over in there."""
    done = execute("docker", "run", "--rm", "--shm-size", "1m", containers.image, "python", "-c", LOADER)
    assert done.returncode != 0
    found = diagnose(Facts(4, launcher=done.stdout + done.stderr))
    assert found.rule == "shared-memory-too-small", done.stderr
    done = execute("docker", "run", "--rm", "--shm-size", "64m", containers.image, "python", "-c", LOADER)
    assert done.returncode == 0, done.stderr
