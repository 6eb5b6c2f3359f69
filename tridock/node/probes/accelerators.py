"""The GPUs and InfiniBand devices that the container sees, and the NVIDIA driver's report on them."""

import ctypes
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tridock.contracts.node_answers import Accelerators, GpuStatus, Infiniband

_LIBRARY: Final = "libcuda.so.1"
_TIMEOUT_S: Final = 30.0
"""Without persistence mode each call reloads the driver, which takes some seconds per GPU."""
_SLOWDOWN: Final = re.compile(r"clocks_(?:event|throttle)_reason_(hw_slowdown|\w+_(?:thermal|power_brake)_slowdown)")
# Since driver 610: KMD Version, CUDA UMD Version.
_VERSIONS: Final = re.compile(r"(?:Driver|KMD) Version:\s*([\d.]+)\s+CUDA (?:UMD )?Version:\s*(\d+\.\d+)")
_NVLINKS: Final = re.compile(r"^GPU .*\(UUID: ([^)]+)\)$|^\s+Link \d+: ([\d.]+) GB/s", re.MULTILINE)


def infiniband() -> Infiniband:
    """Returns this node's InfiniBand devices, and whether the container may use them."""
    return Infiniband(
        tuple(sorted(path.name for path in _listed(Path("/sys/class/infiniband")))),
        usable=any(path.name.startswith("uverbs") for path in _listed(Path("/dev/infiniband"))),
    )


def accelerators() -> Accelerators:
    """Returns the GPUs with their memory, processes and health, the driver, and the CUDA version that a rank gets."""
    try:
        cuda = cuda_driver().version  # first: what it opens keeps the driver loaded meanwhile
        nvlinks = _smi_if_known("nvlink", "--status")  # unsupported by old drivers and GPUs without NVLink
        capabilities = _smi_if_known("--query-gpu=uuid,compute_cap", "--format=csv,noheader")  # by old drivers
        found = parse(_smi("-q", "-x"), _smi(), nvlinks, capabilities)
    except FileNotFoundError:
        return Accelerators()
    except subprocess.TimeoutExpired:
        return Accelerators(gpus=(), error=f"nvidia-smi did not end within {_TIMEOUT_S:g} s", timed_out=True)
    except subprocess.CalledProcessError as error:
        lines = f"{error.stdout or ''}\n{error.stderr or ''}".strip().splitlines()
        return Accelerators(gpus=(), error=lines[-1] if lines else f"nvidia-smi ended with {error.returncode}")
    return replace(found, cuda=cuda or found.cuda, peer_memory=_has_peer_memory())


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """The CUDA driver's answers to a process."""

    error: str | None = None
    """Why it provides no device to a rank."""
    version: str | None = None
    """The CUDA version that it supports."""
    capabilities: tuple[str, ...] = ()
    """The compute capability of each device, such as ``9.0``."""
    multicast: bool = False
    """Whether a write can reach several devices at once, on every device."""


def cuda_driver() -> CudaDriver:
    """Initializes the CUDA driver, which uses no GPU memory.

    It loads the library that a shell of the node finds: with NVIDIA's forward compatibility it is newer than the kernel
    module.
    """
    try:
        driver = ctypes.CDLL(_library())
    except subprocess.TimeoutExpired:
        return CudaDriver(f"bash did not end within {_TIMEOUT_S:g} s: see what its start-up file does (BASH_ENV)")
    except OSError as error:
        return CudaDriver(str(error))
    count, version, text = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_char_p()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        driver.cuGetErrorString(code, ctypes.byref(text))
        return CudaDriver(f"CUDA error {code}: {(text.value or b'unknown').decode()}")
    driver.cuDriverGetVersion(ctypes.byref(version))
    supported = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if not count.value:
        return CudaDriver("cuDeviceGetCount found no device", supported)
    devices = range(count.value)
    capabilities = [f"{_attribute(driver, number, 75)}.{_attribute(driver, number, 76)}" for number in devices]
    return CudaDriver(
        None, supported, tuple(capabilities), all(_attribute(driver, number, 132) == 1 for number in devices)
    )


def _attribute(driver: ctypes.CDLL, number: int, attribute: int) -> int:
    """Returns an attribute by its number in cuda.h: 75 and 76 are COMPUTE_CAPABILITY_MAJOR and _MINOR, 132 is
    MULTICAST_SUPPORTED, which drivers before CUDA 12.1 refuse."""
    device, value = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value


def _library() -> str:
    argv = ["bash", "-c", 'printf %s "${LD_LIBRARY_PATH-}"']
    path = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False).stdout
    candidates = (Path(folder, _LIBRARY) for folder in path.split(":") if folder)
    return str(next((file for file in candidates if file.exists()), _LIBRARY))


def parse(report: str, table: str, nvlinks: str, capabilities: str = "") -> Accelerators:
    """Parses what ``nvidia-smi`` prints: its report as XML, its table with the versions, the state of NVLinks, and the
    compute capability of each UUID."""
    root = ElementTree.fromstring(report)  # noqa: S314 (of NVIDIA's driver)
    links: dict[str, int] = {}
    uuid = ""
    for gpu, rate in _NVLINKS.findall(nvlinks):
        uuid = gpu or uuid
        links[uuid] = links.get(uuid, 0) + bool(rate)
    known = dict(line.split(", ", 1) for line in capabilities.splitlines() if ", " in line)
    gpus = [device for index, gpu in enumerate(root.iter("gpu")) for device in _devices(index, gpu, links, known)]
    versions = _VERSIONS.search(table)
    return Accelerators(tuple(gpus), *(versions.groups() if versions else (None, None)))


def _devices(
    index: int, gpu: ElementTree.Element, links: dict[str, int], capabilities: dict[str, str]
) -> Iterator[GpuStatus]:
    """Yields the GPU, or its MIG slices."""
    uuid = _text(gpu, "uuid")
    ecc = gpu.find("ecc_errors/volatile")
    errors = [] if ecc is None else [int(it.text) for it in ecc.iter() if _counts_uncorrectable(it, ecc) and it.text]
    remapped = {it.tag for it in gpu.iter() if it.tag.startswith("remapped_row_") and it.text == "Yes"}
    slowed = [found[1] for it in gpu.iter() if it.text == "Active" and (found := _SLOWDOWN.fullmatch(it.tag))]
    fabric = [_text(gpu, "fabric/state"), _text(gpu, "fabric/status")]
    whole = GpuStatus(
        index,
        _text(gpu, "product_name"),
        _mib(gpu, "fb_memory_usage/total"),
        _mib(gpu, "fb_memory_usage/used"),
        tuple(_processes(gpu)),
        uuid=uuid,
        uncorrectable_errors=sum(errors),
        row_remapping="failed" if "remapped_row_failure" in remapped else "pending" if remapped else "",
        slowdowns=tuple(slowed),
        fabric=" ".join(it for it in fabric if it not in ("", "Completed", "Success")),
        recovery=_text(gpu, "gpu_recovery_action").replace("None", ""),
        persistent=_text(gpu, "persistence_mode") != "Disabled",
        nvlinks=links.get(uuid),
        capability=capabilities.get(uuid, ""),
    )
    slices = list(gpu.iterfind("mig_devices/mig_device"))
    if _text(gpu, "mig_mode/current_mig") != "Enabled":
        yield whole
    for part in slices:
        memory = [_mib(part, f"fb_memory_usage/{what}") for what in ("total", "used")]
        own = tuple(_processes(gpu, _text(part, "gpu_instance_id")))
        yield replace(whole, name=f"{whole.name} MIG", total=memory[0], used=memory[1], processes=own)


def _counts_uncorrectable(element: ElementTree.Element, ecc: ElementTree.Element) -> bool:
    # Before Ampere: double_bit/total. Since then: dram_uncorrectable, sram_uncorrectable_parity, and so on.
    old = ecc.find("double_bit/total")
    return (element is old or "uncorrectable" in element.tag) and (element.text or "").isdecimal()


def _processes(gpu: ElementTree.Element, instance: str | None = None) -> Iterator[str]:
    for process in gpu.iterfind("processes/process_info"):
        if _text(process, "type") != "G" and (instance is None or _text(process, "gpu_instance_id") == instance):
            memory = _text(process, "used_memory")
            yield f"{_text(process, 'pid')} {_text(process, 'process_name')}{f', {memory}' if memory else ''}"


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    return "" if text in ("N/A", "[N/A]") else text


def _mib(element: ElementTree.Element, path: str) -> int | None:
    # N/A on GPUs that share the machine's memory.
    number = _text(element, path).removesuffix(" MiB")
    return int(number) if number.isdecimal() else None


def _smi_if_known(*options: str) -> str:
    try:
        return _smi(*options)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""


def _has_peer_memory() -> bool:
    """Whether an InfiniBand device can read a GPU's memory, by a kernel module or by the open driver's DMA buffers."""
    version = Path("/proc/driver/nvidia/version")
    return Path("/sys/module/nvidia_peermem").exists() or (
        version.exists() and "Open Kernel Module" in version.read_text()
    )


def _smi(*options: str) -> str:
    done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
