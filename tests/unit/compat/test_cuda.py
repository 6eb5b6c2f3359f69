"""What code for CUDA sees of a rank that trains on the CPU, in a process of its own: torch is changed for good."""

from __future__ import annotations

import subprocess
import sys

SEEN_BY_THE_COUNT = """
import torch
from tridock import compat
torch.cuda.is_available = lambda: torch.cuda.device_count() > 0  # torch's CUDA build, as DeepSpeed sets it
compat.install("cpu", 2)
print(torch.cuda.device_count(), torch.cuda.is_available())
"""


def test_cuda_stays_unavailable_with_torchs_cuda_build() -> None:
    """Otherwise data loaders pin memory, which needs the driver."""
    done = subprocess.run([sys.executable, "-c", SEEN_BY_THE_COUNT], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
