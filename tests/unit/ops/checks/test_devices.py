"""GPUs and InfiniBand: what is said of them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.ops.checks.lab import make_cluster, node_report, shown
from tridock.contracts.node_answers import Accelerators, Code, GpuStatus, Infiniband, NodeReport
from tridock.errors import ClusterError
from tridock.ops.checks import quick
from tridock.ops.checks.devices import GpuHost, device_findings, gpu_host_command, parse_gpu_host
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.remote import LocalHost

H100 = "NVIDIA H100 80GB HBM3"
GONE = "Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."


def gpus(count: int = 2, name: str = H100, cuda_error: str | None = None, **changes: Any) -> NodeReport:
    own = tuple(GpuStatus(slot, name, 81559, 4) for slot in range(count))
    accelerators = Accelerators(**{"gpus": own, "driver": "580.65.06", "cuda": "13.0", **changes})
    return node_report(
        built_for="cuda", cuda_error=cuda_error, accelerators=accelerators, code=Code("a", "b", cuda="13.1")
    )


def test_the_same_gpus_everywhere_and_idle(tmp_path: Path) -> None:
    assert shown(device_findings(make_cluster(tmp_path), {"host-1": gpus(), "host-2": gpus()})) == []


def test_no_gpu_fewer_gpus_and_busy_ones(tmp_path: Path) -> None:
    busy = gpus(gpus=(GpuStatus(0, H100, 81559, 4, ("4711 python, 900 MiB",)), GpuStatus(1, H100, 81559, 40000)))
    answers = {"host-1": gpus(), "host-2": gpus(0, error="couldn't communicate with the NVIDIA driver")}
    answers |= {"host-3": gpus(1), "host-4": busy}
    assert shown(device_findings(make_cluster(tmp_path, hosts=4), answers)) == [
        "fail  host-2: no GPU is visible in its container; got couldn't communicate with the NVIDIA driver; "
        "see that nvidia-smi works on the host and in docker run --gpus all (NVIDIA's container toolkit)",
        "fail  host-3: has fewer GPUs than slots; got 1 GPU, slots 1 asked for; "
        "correct its slots in the hostfile, or see why nvidia-smi shows fewer there",
        "warn  host-4: GPU 0 is in use; got 4711 python, 900 MiB; "
        "end what uses it (nvidia-smi there shows it), or leave the slot out with --exclude",
        "warn  host-4: GPU 1 is in use; got 40000 of 81559 MiB held by processes that cannot be seen from here; "
        "end what uses it (nvidia-smi there shows it), or leave the slot out with --exclude",
    ]


def test_a_process_that_only_the_host_sees_is_named(tmp_path: Path) -> None:
    own = gpus(1, gpus=(GpuStatus(0, H100, 81559, 40000, uuid="GPU-aa"),))
    host = GpuHost(processes={"GPU-aa": ("4711 /usr/bin/python3, 39990 MiB",)})
    found = device_findings(make_cluster(tmp_path, slots=1, hosts=1), {"host-1": own}, {"host-1": host})
    assert shown(found) == [
        "warn  host-1: GPU 0 is in use; got 4711 /usr/bin/python3, 39990 MiB; "
        "end what uses it (nvidia-smi there shows it), or leave the slot out with --exclude"
    ]


def test_what_a_host_says_is_read(tmp_path: Path) -> None:
    (tmp_path / "dmesg").write_text(
        "#!/bin/sh\n"
        f"echo '[12.1] NVRM: {GONE}'\n"
        "echo '[13.5] NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, Ch 00000008'\n"
    )
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU-aa, 4711, /usr/bin/python3, 39990 MiB'\n")
    for name in ("dmesg", "nvidia-smi"):
        (tmp_path / name).chmod(0o755)
    argv = gpu_host_command().argv
    for path, expected in (
        (f"{tmp_path}:/usr/bin:/bin", GpuHost((GONE,), {"GPU-aa": ("4711 /usr/bin/python3, 39990 MiB",)})),
        ("/nowhere", GpuHost()),
    ):
        done = subprocess.run(
            argv, env={"PATH": path}, executable="/bin/sh", capture_output=True, text=True, check=False
        )
        assert parse_gpu_host(done.stdout) == expected


def test_an_unhealthy_gpu(tmp_path: Path) -> None:
    ill = GpuStatus(
        1,
        H100,
        81559,
        0,
        uncorrectable_errors=3,
        row_remapping="pending",
        slowdowns=("hw_slowdown", "hw_thermal_slowdown"),
        fabric="In Progress",
        recovery="Reset",
        persistent=False,
        nvlinks=16,
    )
    report = gpus(gpus=(GpuStatus(0, H100, 81559, 0, nvlinks=18), ill))
    found = device_findings(make_cluster(tmp_path, hosts=1), {"host-1": report}, {"host-1": GpuHost((GONE,))})
    assert shown(found) == [
        f"warn  host-1: its driver logged errors of a GPU; got {GONE}; "
        "look the number up in NVIDIA's list of Xid errors, and leave the GPU out with --exclude if it returns",
        "fail  host-1: GPU 1 has not joined the NVLink fabric; got In Progress; "
        "start the fabric manager there (sudo systemctl start nvidia-fabricmanager), then tridock down, tridock up",
        "fail  host-1: GPU 1 needs recovery; got Reset; "
        "do that there (sudo nvidia-smi --gpu-reset -i 1, or restart the host), or --exclude the slot",
        "warn  host-1: GPU 1 has uncorrectable memory errors; "
        "got 3 since the driver was loaded, row remapping pending; "
        "reset it there (sudo nvidia-smi --gpu-reset -i 1), and replace it if they return",
        "warn  host-1: GPU 1 has lowered its clocks; got hw_slowdown, hw_thermal_slowdown; "
        "see its cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER there)",
        "warn  host-1: GPU 1 has inactive NVLinks; got 16 active, 18 of another GPU; "
        "see nvidia-smi nvlink --status there, and reset the GPU",
        "warn  host-1: persistence mode of its GPUs is off; turn it on there: sudo nvidia-smi -pm 1",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"error": "Failed to initialize NVML: Unknown Error"},
            "its container has lost its GPUs; got Failed to initialize NVML: Unknown Error; "
            "recreate its container: tridock down, then tridock up",
        ),
        (
            {"error": "Failed to initialize NVML: Driver/library version mismatch"},
            "its container has the libraries of another driver; "
            "got Failed to initialize NVML: Driver/library version mismatch; "
            "restart the host, whose driver was updated, then tridock down, tridock up",
        ),
        (
            {"error": "nvidia-smi did not end within 30 s", "timed_out": True},
            "no GPU is visible in its container; got nvidia-smi did not end within 30 s; "
            "turn persistence mode on there (sudo nvidia-smi -pm 1), and look for Xid lines in dmesg",
        ),
        (
            {"error": "No devices were found"},
            "no GPU is visible in its container; got No devices were found; "
            "see that nvidia-smi works on the host and in docker run --gpus all (NVIDIA's container toolkit)",
        ),
    ],
    ids=["lost", "driver updated", "slow", "none"],
)
def test_a_container_without_gpus_gets_the_remedy_that_works(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    found = device_findings(make_cluster(tmp_path, hosts=1), {"host-1": gpus(0, **changes)})
    assert shown(found) == [f"fail  host-1: {expected}"]


def test_forward_compatibility_is_no_failure(tmp_path: Path) -> None:
    """The kernel's driver is for CUDA 12.4; the library that ranks load supports the image's 13.1."""
    report = gpus(driver="550.90.07", cuda="13.1")
    assert shown(device_findings(make_cluster(tmp_path, hosts=1), {"host-1": report})) == []


def test_infiniband_without_access_to_the_gpus_memory(tmp_path: Path) -> None:
    report = replace(gpus(), infiniband=Infiniband(("mlx5_0",), usable=True))
    cluster = make_cluster(tmp_path, hosts=1)
    assert shown(device_findings(cluster, {"host-1": report})) == [
        "warn  host-1: has InfiniBand devices that cannot read its GPUs' memory; got mlx5_0; "
        "load the module there: sudo modprobe nvidia_peermem"
    ]
    able = replace(report, accelerators=replace(report.accelerators, peer_memory=True))
    assert shown(device_findings(cluster, {"host-1": able})) == []


def test_a_driver_that_is_too_old_for_the_image(tmp_path: Path) -> None:
    old = gpus(driver="550.90.07", cuda="12.4")
    assert shown(device_findings(make_cluster(tmp_path), {"host-1": gpus(), "host-2": old})) == [
        "fail  host-2: its driver is too old for the image; "
        "got driver 550.90.07 for CUDA 12.4, the image has CUDA 13.1; "
        "install a newer driver there, "
        "or build the image on an older base: tridock image --base-image nvcr.io/nvidia/pytorch:24.12-py3",
        "warn  host-2: has another driver than the head; got 550.90.07, 580.65.06 on host-1; "
        "choose nodes with the same driver (--include), or continue if this is intended",
    ]


def test_gpus_that_the_images_torch_has_no_kernels_for(tmp_path: Path) -> None:
    def with_gpu(capability: str, cuda: str = "13.0") -> list[str]:
        own = gpus(gpus=(GpuStatus(0, H100, 81559, 4, capability=capability), GpuStatus(1, H100, 81559, 4)), cuda=cuda)
        return shown(device_findings(make_cluster(tmp_path, hosts=1), {"host-1": replace(own, architectures=BUILT)}))

    what = "fail  host-1: the image's torch has no kernels for its GPUs; got compute capability"
    assert with_gpu("7.0") == [f"fail  {NO_KERNELS}"]
    assert with_gpu("6.0") == [f"{what} 6.0, kernels for sm_75 sm_80 sm_90; leave the node out with --exclude"]
    assert with_gpu("8.9") == with_gpu("") == []


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
        "recreate its container: tridock down, then tridock up",
        "warn  host-2: has InfiniBand devices that NCCL_IB_DISABLE=1 leaves unused; got mlx5_0; "
        "remove NCCL_IB_DISABLE from env in the settings",
    ]


NOT_READY = "CUDA error 802: system not yet initialized"
NO_CUDA = (
    f"host-2: CUDA has no usable GPU in its container; got {NOT_READY}; "
    "see that nvidia-smi works on the host, then recreate its container: tridock down, then tridock up"
)


BUILT = ("sm_75", "sm_80", "sm_90")
NO_KERNELS = (
    "host-1: the image's torch has no kernels for its GPUs; "
    "got compute capability 7.0, kernels for sm_75 sm_80 sm_90; "
    "build the image on a base for them: tridock image --base-image nvcr.io/nvidia/pytorch:24.12-py3"
)


def test_gpus_that_cuda_cannot_use(tmp_path: Path) -> None:
    answers = {"host-1": gpus(), "host-2": gpus(cuda_error=NOT_READY)}
    assert shown(device_findings(make_cluster(tmp_path), answers)) == [f"fail  {NO_CUDA}"]


def test_a_launch_on_such_a_node_is_refused_unless_it_asks_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(make_cluster(tmp_path), {"host-1": LocalHost(), "host-2": LocalHost()})
    foreign = replace(gpus(), architectures=BUILT, capabilities=("9.0", "7.0", "5.0"))  # the third is no slot
    answers = {"host-1": foreign, "host-2": gpus(cuda_error=NOT_READY)}
    container = SimpleNamespace(image_id="sha256:0")
    client = NodeClient(hosts, dict.fromkeys(answers, SimpleNamespace(container=container)))  # type: ignore[arg-type]
    monkeypatch.setattr(quick, "node_report", lambda client, node, kind, *arguments: answers[node])
    with pytest.raises(ClusterError) as caught:
        quick.check_quickly(client)
    assert str(caught.value) == f"{NO_KERNELS}\n{NO_CUDA}"
    quick.check_quickly(client, on_cpu=True)
