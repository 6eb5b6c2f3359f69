"""Training on a node of the GPU image whose nvidia-smi lists GPUs that CUDA cannot use."""

from __future__ import annotations

import re

import pytest

from tests.integration.support import Containers
from tests.rehearsal.conftest import NvidiaSmi
from tests.unit.contracts.test_devices import WHOLE
from tests.unit.node.test_accelerators import HEALTHY, TABLES, report

TRAIN = (
    "tridock data demo && tridock train /opt/tridock/configs/demo.yaml --nproc 1 --set train.train_iters=4"
    " --set train.eval_interval=0 --set train.log_interval=1 --set optimizer.lr_warmup_iters=2"
    " --set model.num_layers=2 --set model.hidden_size=64 --set parallel.strategy=ddp --set parallel.zero_stage=0"
)
REASON = "device: torch has no GPU for local rank 0; got Found no NVIDIA driver on your system"


@pytest.mark.parametrize(("accelerator", "code"), [("cuda", 4), ("cpu", 0)])
def test_a_run_ends_with_torchs_reason_unless_the_cpu_was_asked_for(
    containers: Containers, nvidia_smi: NvidiaSmi, accelerator: str, code: int
) -> None:
    nvidia_smi.answer(TABLES["580.65.06"], report(HEALTHY, HEALTHY), WHOLE)
    options = [word for mount in nvidia_smi.mounts for word in ("--volume", mount)]
    options += ["--env", f"DS_ACCELERATOR={accelerator}", "--shm-size", "1g"]
    done = containers.run("bash", "-c", TRAIN, options=options)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert (REASON in output) == (accelerator == "cuda")
    assert (re.search(r"iteration +4\b", output) is not None) == (accelerator == "cpu")
