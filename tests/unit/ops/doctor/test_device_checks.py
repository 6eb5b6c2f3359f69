"""GPUs and InfiniBand: what is said of them."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.ops.doctor.lab import make_cluster, node_report, shown
from tridock.contracts.node_answers import Accelerators, Code, Gpu, Infiniband, NodeReport
from tridock.errors import ClusterError
from tridock.node.probes.accelerators import cuda_error, parse
from tridock.ops.doctor.device_checks import device_findings
from tridock.ops.hosts.session import Session

H100 = "NVIDIA H100 80GB HBM3"
CSV = """\
0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 0, 580.65.06
1, GPU-bb, NVIDIA H100 80GB HBM3, 81559, 40021, 580.65.06
"""
PROCESSES = "GPU-bb, 4711, /opt/venv/bin/python, 40000\n"
HEADER = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |\n"


def test_what_nvidia_smi_prints_is_read() -> None:
    assert parse(CSV, PROCESSES, HEADER) == Accelerators(
        (Gpu(0, H100, 81559, 0), Gpu(1, H100, 81559, 40021, ("4711 /opt/venv/bin/python",))), "580.65.06", "13.0"
    )
    shared = parse("0, GPU-cc, NVIDIA GB10, [N/A], [N/A], 580.95.05\n", "", "no table")
    assert shared == Accelerators((Gpu(0, "NVIDIA GB10", None, None),), "580.95.05", None)


def gpus(count: int = 2, name: str = H100, cuda_error: str | None = None, **changes: Any) -> NodeReport:
    own = tuple(Gpu(slot, name, 81559, 4) for slot in range(count))
    accelerators = Accelerators(**{"gpus": own, "driver": "580.65.06", "cuda": "13.0", **changes})
    return node_report(
        built_for="cuda", cuda_error=cuda_error, accelerators=accelerators, code=Code("a", "b", cuda="13.1")
    )


def test_the_same_gpus_everywhere_and_idle(tmp_path: Path) -> None:
    assert shown(device_findings(make_cluster(tmp_path), {"host-1": gpus(), "host-2": gpus()})) == []


def test_no_gpu_fewer_gpus_and_busy_ones(tmp_path: Path) -> None:
    busy = gpus(gpus=(Gpu(0, H100, 81559, 4, ("4711 python",)), Gpu(1, H100, 81559, 40000)))
    answers = {"host-1": gpus(), "host-2": gpus(0, error="couldn't communicate with the NVIDIA driver")}
    answers |= {"host-3": gpus(1), "host-4": busy}
    assert shown(device_findings(make_cluster(tmp_path, hosts=4), answers)) == [
        "fail  host-2: no GPU is visible in its container; got couldn't communicate with the NVIDIA driver; "
        "see that nvidia-smi works on the host and in docker run --gpus all (NVIDIA's container toolkit)",
        "fail  host-3: has fewer GPUs than slots; got 1 GPUs, slots 1 asked for; "
        "correct its slots in the hostfile, or see why nvidia-smi shows fewer there",
        "warn  host-4: GPU 0 is in use; got 4711 python; "
        "end what uses it (nvidia-smi there shows it), or leave the slot out with --exclude",
        "warn  host-4: GPU 1 is in use; got 40000 of 81559 MiB held by processes that cannot be seen from here; "
        "end what uses it (nvidia-smi there shows it), or leave the slot out with --exclude",
    ]


def test_a_driver_that_is_too_old_for_the_image(tmp_path: Path) -> None:
    old = gpus(driver="550.90.07", cuda="12.4")
    assert shown(device_findings(make_cluster(tmp_path), {"host-1": gpus(), "host-2": old})) == [
        "fail  host-2: its driver is too old for the image; "
        "got driver 550.90.07 for CUDA 12.4, the image has CUDA 13.1; "
        "install a newer driver there, or build the image on an older base (make image BASE_IMAGE=...)",
        "warn  host-2: has another driver than the head; got 550.90.07, 580.65.06 on host-1; "
        "choose nodes with the same driver (--include), or continue if this is intended",
    ]


def test_other_gpus_than_the_heads(tmp_path: Path) -> None:
    answers = {"host-1": gpus(), "host-2": gpus(name="NVIDIA A100-SXM4-80GB")}
    assert shown(device_findings(make_cluster(tmp_path), answers)) == [
        f"warn  host-2: has other GPUs than the head; got NVIDIA A100-SXM4-80GB, {H100} on host-1; "
        "choose nodes with the same GPUs (--include), or continue if this is intended",
    ]


def test_infiniband_that_is_there_and_unused(tmp_path: Path) -> None:
    hidden = node_report(
        infiniband=Infiniband(
            (
                "mlx5_0",
                "mlx5_1",
            ),
            usable=False,
        )
    )
    off = node_report(infiniband=Infiniband(("mlx5_0",), usable=True), nccl_ib_disable="1")
    assert shown(device_findings(make_cluster(tmp_path), {"host-1": hidden, "host-2": off})) == [
        "warn  host-1: has InfiniBand devices that its container does not see; got mlx5_0, mlx5_1; "
        "start its container anew: fab down, then fab up",
        "warn  host-2: has InfiniBand devices that NCCL_IB_DISABLE=1 leaves unused; got mlx5_0; "
        "remove NCCL_IB_DISABLE from env in the settings",
    ]


def libcuda(init: int = 0, devices: int = 1) -> Callable[[str], SimpleNamespace]:
    """A stand-in for CUDA's driver."""

    def count(found: Any) -> int:
        found._obj.value = devices
        return 0

    def text(code: int, found: Any) -> int:
        found._obj.value = {100: b"no CUDA-capable device is detected", 802: b"system not yet initialized"}[code]
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=count, cuGetErrorString=text)
    return lambda name: driver


@pytest.mark.parametrize(
    ("driver", "error"),
    [
        (libcuda(), None),
        (libcuda(802), "CUDA error 802: system not yet initialized"),
        (libcuda(100), "CUDA error 100: no CUDA-capable device is detected"),
        (libcuda(devices=0), "cuDeviceGetCount found no device"),
    ],
)
def test_what_cudas_driver_says(
    driver: Callable[[str], SimpleNamespace], error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert cuda_error() == error


def test_a_node_without_cudas_driver() -> None:
    assert (cuda_error("libnone.so.1") or "").startswith("libnone.so.1: cannot open shared object file")


NOT_READY = "CUDA error 802: system not yet initialized"
NO_CUDA = (
    f"host-2: CUDA has no usable GPU in its container; got {NOT_READY}; "
    "see that nvidia-smi works on the host, then start its container anew: fab down, then fab up"
)


def test_gpus_that_cuda_cannot_use(tmp_path: Path) -> None:
    answers = {"host-1": gpus(), "host-2": gpus(cuda_error=NOT_READY)}
    assert shown(device_findings(make_cluster(tmp_path), answers)) == [f"fail  {NO_CUDA}"]


def test_a_launch_on_such_a_node_is_refused_unless_it_asks_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(make_cluster(tmp_path))
    answers = {"host-1": gpus(), "host-2": gpus(cuda_error=NOT_READY)}
    monkeypatch.setattr(session, "each", lambda ask: {node: ask(node, None) for node in session.nodes})
    container = SimpleNamespace(image_id="sha256:0")
    monkeypatch.setattr(session, "states", lambda: dict.fromkeys(answers, SimpleNamespace(container=container)))
    check = importlib.import_module("tridock.ops.doctor.check")
    monkeypatch.setattr(check, "node_report", lambda session, node, kind, *arguments: answers[node])
    with pytest.raises(ClusterError) as caught:
        check.check_quickly(session)
    assert str(caught.value) == NO_CUDA
    check.check_quickly(session, on_cpu=True)
