"""A node of the GPU image: the base's start-up script, the environment, and what the probes read from each driver."""

from __future__ import annotations

import pytest

from tests.integration.support import execute, inside, succeed, wait_until
from tests.integration.test_node import parsed
from tests.rehearsal.conftest import NvidiaSmi
from tests.unit.contracts.test_devices import SLICED as SLICED_LIST
from tests.unit.contracts.test_devices import WHOLE
from tests.unit.node.test_accelerators import FAULTY, H100, HEALTHY, SLICED, TABLES, report
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import NodeReport

LOST = "echo 'Failed to initialize NVML: Unknown Error'; exit 255"


def probe(container: str) -> NodeReport:
    return decode(NodeReport, inside(container, "python", "-m", "tridock.node", "node-report"))


def test_a_slow_nvidia_smi_is_asked_once_a_start_and_the_node_is_healthy(start_twin, nvidia_smi: NvidiaSmi) -> None:
    nvidia_smi.answer(TABLES["580.65.06"], before="sleep 6")
    node = start_twin(4321, mounts=nvidia_smi.mounts)["node-1"]
    status = ("docker", "inspect", "--format", "{{.State.Health.Status}}", node)
    wait_until(lambda: succeed(*status).strip() == "healthy", "healthy")
    for _ in range(2):
        inside(node, "healthcheck.sh")
        inside(node, "ssh", "node-2", "true")
        inside(node, "bash", "-c", "true")
    assert nvidia_smi.calls == ["", ""]  # by each of the two nodes
    nvidia_smi.answer(TABLES["580.65.06"])
    succeed("docker", "restart", "--time", "1", node)
    wait_until(lambda: execute("docker", "exec", node, "healthcheck.sh").returncode == 0, "healthy again")
    assert nvidia_smi.calls == ["", "", ""]


@pytest.mark.parametrize(
    ("driver", "compat"), [("535.129.03", "/usr/local/cuda/compat/lib:"), ("580.65.06", ""), ("610.43.02", "")]
)
def test_every_way_in_has_the_environment_of_the_base(
    start_twin, nvidia_smi: NvidiaSmi, driver: str, compat: str
) -> None:
    nvidia_smi.answer(TABLES[driver])
    node = start_twin(4321, mounts=nvidia_smi.mounts)["node-1"]
    by_shell = parsed(inside(node, "bash", "-c", "env"))
    assert by_shell["LD_LIBRARY_PATH"] == f"{compat}/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
    assert by_shell["PATH"].startswith(
        "/opt/venv/bin:/opt/tridock/entrypoint:/usr/local/nvidia/bin:/usr/local/cuda/bin:"
    )
    assert (by_shell["TORCH_CUDA_ARCH_LIST"], by_shell["DS_ACCELERATOR"]) == ("9.0 9.0+PTX", "cuda")
    for way in ("env", "bash -c env", "bash -lc env"):
        assert parsed(inside(node, "ssh", "node-2", way)) == by_shell, way
    assert inside(node, "ssh", "node-2", "python -c 'import torch; print(torch.version.cuda)'") == "13.0\n"


def test_the_probes_read_every_driver(start_twin, nvidia_smi: NvidiaSmi) -> None:
    node = start_twin(4321, mounts=nvidia_smi.mounts)["node-1"]
    for driver, cuda in (("535.129.03", "12.2"), ("580.65.06", "13.0"), ("610.43.02", "13.3")):
        nvidia_smi.answer(TABLES[driver], report(HEALTHY, FAULTY), WHOLE)
        found = probe(node)
        assert found.cuda_error == "libcuda.so.1: cannot open shared object file: No such file or directory"
        assert (found.accelerators.driver, found.accelerators.cuda) == (driver, cuda)
        assert [gpu.recovery for gpu in found.accelerators.gpus or ()] == ["", "Reset"]
    nvidia_smi.answer(TABLES["580.65.06"], report(SLICED, HEALTHY), SLICED_LIST)
    names = [gpu.name for gpu in probe(node).accelerators.gpus or ()]
    assert names == ["NVIDIA A100-SXM4-40GB MIG", "NVIDIA A100-SXM4-40GB MIG", H100]
    nvidia_smi.answer(before=LOST)
    lost = probe(node).accelerators
    assert (lost.gpus, lost.error) == ((), "Failed to initialize NVML: Unknown Error")
