"""What NVIDIA's driver says of a node's GPUs: outputs on record of its generations, in working and broken states."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import STEP_S
from tridock.contracts.node_answers import Accelerators, GpuStatus
from tridock.node.probes import accelerators as probe
from tridock.node.probes.accelerators import CudaDriver, cuda_driver, parse

H100 = "NVIDIA H100 80GB HBM3"
TABLES = {
    "535.129.03": "| NVIDIA-SMI 535.129.03             Driver Version: 535.129.03   CUDA Version: 12.2     |",
    "580.65.06": "| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: 13.0     |",
    "610.43.02": "| NVIDIA-SMI 610.43.02              KMD Version: 610.43.02     CUDA UMD Version: 13.3     |",
}
NVLINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def report(*gpus: str) -> str:
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    whole = "".join(f'<gpu id="{i:08x}:00.0"><uuid>GPU-{i}</uuid>{gpu}</gpu>' for i, gpu in enumerate(gpus))
    return f"{head}<nvidia_smi_log><attached_gpus>{len(gpus)}</attached_gpus>{whole}</nvidia_smi_log>"


HEALTHY = f"""
<product_name>{H100}</product_name>
<persistence_mode>Enabled</persistence_mode>
<mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
<mig_devices>
    None
</mig_devices>
<gpu_recovery_action>None</gpu_recovery_action>
<fb_memory_usage><total>81559 MiB</total><reserved>553 MiB</reserved><used>0 MiB</used></fb_memory_usage>
<clocks_event_reasons>
  <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
  <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
  <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons>
<ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
  <dram_uncorrectable>0</dram_uncorrectable></volatile>
  <aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate></ecc_errors>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_pending>No</remapped_row_pending>
  <remapped_row_failure>No</remapped_row_failure></remapped_rows>
<fabric><state>Completed</state><status>Success</status></fabric>
<processes></processes>
"""
FAULTY = """
<product_name>NVIDIA H100 80GB HBM3</product_name>
<persistence_mode>Disabled</persistence_mode>
<mig_mode><current_mig>N/A</current_mig><pending_mig>N/A</pending_mig></mig_mode>
<gpu_recovery_action>Reset</gpu_recovery_action>
<fb_memory_usage><total>81559 MiB</total><used>40021 MiB</used></fb_memory_usage>
<clocks_event_reasons>
  <clocks_event_reason_hw_slowdown>Active</clocks_event_reason_hw_slowdown>
  <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
  <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
</clocks_event_reasons>
<ecc_errors><volatile><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
  <sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_uncorrectable>2</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>Yes</remapped_row_pending>
  <remapped_row_failure>No</remapped_row_failure></remapped_rows>
<fabric><state>In Progress</state><status>N/A</status></fabric>
<processes>
  <process_info><gpu_instance_id>N/A</gpu_instance_id><pid>4711</pid><type>C</type>
    <process_name>/opt/venv/bin/python</process_name><used_memory>40000 MiB</used_memory></process_info>
  <process_info><pid>12</pid><type>G</type><process_name>Xorg</process_name>
    <used_memory>4 MiB</used_memory></process_info>
</processes>
"""
VOLTA = """
<product_name>Tesla V100-SXM2-16GB</product_name>
<persistence_mode>Enabled</persistence_mode>
<fb_memory_usage><total>16160 MiB</total><used>0 MiB</used></fb_memory_usage>
<clocks_throttle_reasons><clocks_throttle_reason_hw_power_brake_slowdown>Active</clocks_throttle_reason_hw_power_brake_slowdown></clocks_throttle_reasons>
<ecc_errors><volatile><single_bit><total>5</total></single_bit><double_bit><device_memory>3</device_memory><total>3</total></double_bit></volatile></ecc_errors>
"""
SHARED = """
<product_name>NVIDIA GB10</product_name><persistence_mode>Enabled</persistence_mode>
<fb_memory_usage><total>N/A</total><used>N/A</used></fb_memory_usage>
<ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>
<fabric><state>N/A</state><status>N/A</status></fabric>
"""
SLICED = """
<product_name>NVIDIA A100-SXM4-40GB</product_name><persistence_mode>Enabled</persistence_mode>
<mig_mode><current_mig>Enabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>
<mig_devices>
  <mig_device><index>0</index><gpu_instance_id>1</gpu_instance_id>
    <fb_memory_usage><total>20096 MiB</total><used>107 MiB</used></fb_memory_usage></mig_device>
  <mig_device><index>1</index><gpu_instance_id>5</gpu_instance_id>
    <fb_memory_usage><total>9984 MiB</total><used>13 MiB</used></fb_memory_usage></mig_device>
</mig_devices>
<fb_memory_usage><total>40960 MiB</total><used>249 MiB</used></fb_memory_usage>
<processes><process_info><gpu_instance_id>5</gpu_instance_id><pid>81</pid><type>C</type>
  <process_name>python</process_name><used_memory>90 MiB</used_memory></process_info></processes>
"""


@pytest.mark.parametrize(("driver", "cuda"), [("535.129.03", "12.2"), ("580.65.06", "13.0"), ("610.43.02", "13.3")])
def test_the_versions_of_every_driver_are_read(driver: str, cuda: str) -> None:
    found = parse(report(HEALTHY), TABLES[driver], "")
    assert found == Accelerators((GpuStatus(0, H100, 81559, 0, uuid="GPU-0"),), driver, cuda)


def test_the_compute_capability_is_that_of_the_uuid() -> None:
    found = parse(report(HEALTHY, HEALTHY), TABLES["580.65.06"], "", "GPU-1, 9.0\nGPU-0, 8.0\n")
    assert [gpu.capability for gpu in found.gpus or ()] == ["8.0", "9.0"]


def test_a_faulty_gpu_says_what_it_has() -> None:
    found = parse(report(HEALTHY, FAULTY), TABLES["580.65.06"], NVLINKS)
    assert found.gpus == (
        GpuStatus(0, H100, 81559, 0, uuid="GPU-0", nvlinks=2),
        GpuStatus(
            1,
            H100,
            81559,
            40021,
            ("4711 /opt/venv/bin/python, 40000 MiB",),
            uuid="GPU-1",
            uncorrectable_errors=3,
            row_remapping="pending",
            slowdowns=("hw_slowdown", "hw_thermal_slowdown"),
            fabric="In Progress",
            recovery="Reset",
            persistent=False,
            nvlinks=1,
        ),
    )


def test_an_old_gpu_and_one_that_shares_its_memory() -> None:
    found = parse(report(VOLTA, SHARED), TABLES["580.65.06"], "")
    assert found.gpus == (
        GpuStatus(
            0,
            "Tesla V100-SXM2-16GB",
            16160,
            0,
            uuid="GPU-0",
            uncorrectable_errors=3,
            slowdowns=("hw_power_brake_slowdown",),
        ),
        GpuStatus(1, "NVIDIA GB10", None, None, uuid="GPU-1"),
    )


def test_a_divided_gpu_is_its_slices() -> None:
    found = parse(report(SLICED, HEALTHY), TABLES["580.65.06"], "")
    assert found.gpus is not None
    assert [(gpu.name, gpu.total, gpu.processes) for gpu in found.gpus] == [
        ("NVIDIA A100-SXM4-40GB MIG", 20096, ()),
        ("NVIDIA A100-SXM4-40GB MIG", 9984, ("81 python, 90 MiB",)),
        (H100, 81559, ()),
    ]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'No devices were found'; exit 6", Accelerators((), error="No devices were found")),
        (
            "echo 'Failed to initialize NVML: Unknown Error'; exit 255",
            Accelerators((), error="Failed to initialize NVML: Unknown Error"),
        ),
        ("exec sleep 9999", Accelerators((), error="nvidia-smi did not end within 0.2 s", timed_out=True)),
    ],
    ids=["no devices", "devices lost", "slow"],
)
def test_a_driver_that_does_not_answer(
    script: str, expected: Accelerators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.2 if "sleep" in script else STEP_S)
    assert probe.accelerators() == expected


def test_a_driver_that_is_loaded_at_each_question_has_the_time_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs without persistence mode take twelve seconds or more; here all times are a tenth."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nsleep 1.2; echo 'No devices were found'; exit 6\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "_TIMEOUT_S", probe._TIMEOUT_S / 10)
    assert probe.accelerators() == Accelerators((), error="No devices were found")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"}, False),
        ({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06"}, True),
        ({"sys/module/nvidia_peermem/refcnt": "0"}, True),
    ],
    ids=["no driver", "closed driver", "open driver", "module"],
)
def test_peer_memory_is_of_a_module_or_of_the_open_driver(
    files: dict[str, str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(probe, "Path", lambda name: tmp_path / name.removeprefix("/"))
    assert probe._has_peer_memory() == expected


def libcuda(init: int = 0, devices: int = 1, multicast: tuple[int, ...] = ()) -> Callable[[str], SimpleNamespace]:
    """A stand-in for CUDA's driver."""

    def write(value: object) -> Callable[[Any], int]:
        def into(found: Any) -> int:
            found._obj.value = value
            return 0

        return into

    def text(code: int, found: Any) -> int:
        return write({100: b"no CUDA-capable device is detected", 802: b"system not yet initialized"}[code])(found)

    driver = SimpleNamespace(
        cuInit=lambda flags: init,
        cuDeviceGetCount=write(devices),
        cuGetErrorString=text,
        cuDriverGetVersion=write(13010),
        cuDeviceGet=lambda device, number: write(number)(device),
        # Of the first 9.0, of the next 10.1; a driver that does not know multicast writes nothing.
        cuDeviceGetAttribute=lambda found, which, device: (
            write({75: 9, 76: 0}[which] + device.value)(found)
            if which != 132
            else write(multicast[device.value])(found)
            if multicast
            else 1
        ),
    )
    return lambda name: driver


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (libcuda(devices=2), CudaDriver(None, "13.1", ("9.0", "10.1"))),
        (libcuda(devices=2, multicast=(1, 1)), CudaDriver(None, "13.1", ("9.0", "10.1"), multicast=True)),
        (libcuda(devices=2, multicast=(1, 0)), CudaDriver(None, "13.1", ("9.0", "10.1"))),
        (libcuda(802), CudaDriver("CUDA error 802: system not yet initialized")),
        (libcuda(100), CudaDriver("CUDA error 100: no CUDA-capable device is detected")),
        (libcuda(devices=0), CudaDriver("cuDeviceGetCount found no device", "13.1")),
    ],
)
def test_what_cudas_driver_says(
    driver: Callable[[str], SimpleNamespace], expected: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert cuda_driver() == expected


def test_the_library_is_the_one_of_the_nodes_shells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's forward compatibility puts its own before the host's; only shells have that path."""
    (tmp_path / "libcuda.so.1").touch()
    (tmp_path / "bash-env.sh").write_text(f"export LD_LIBRARY_PATH=/nowhere:{tmp_path}\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "bash-env.sh"))
    asked: list[str] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        return libcuda()(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert cuda_driver() == CudaDriver(None, "13.1", ("9.0",))
    assert asked == [str(tmp_path / "libcuda.so.1")]


def test_a_node_without_cudas_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_LIBRARY", "libnone.so.1")
    found = cuda_driver()
    assert (found.error or "").startswith("libnone.so.1: cannot open shared object file")
    assert found == CudaDriver(found.error)
