"""The GPUs and InfiniBand devices that the container sees."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tridock.contracts.node_answers import Accelerators, Gpu, Infiniband

_FIELDS: Final = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
_TIMEOUT_S: Final = 8.0


def infiniband() -> Infiniband:
    """The InfiniBand devices of the host."""
    return Infiniband(
        tuple(sorted(path.name for path in _listed(Path("/sys/class/infiniband")))),
        usable=any(path.name.startswith("uverbs") for path in _listed(Path("/dev/infiniband"))),
    )


def accelerators() -> Accelerators:
    """The GPUs with their memory and processes, the driver and its CUDA."""
    try:
        found = _smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
        processes = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
        header = _smi()
    except FileNotFoundError:
        return Accelerators()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return Accelerators(gpus=(), error=_message(error))
    return parse(found, processes, header)


def cuda_error(library: str = "libcuda.so.1") -> str | None:
    """Why CUDA's driver gives a process of this node no device; None if it gives one. Takes no memory of a GPU."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    count, name = ctypes.c_int(0), ctypes.c_char_p()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if not code:
        return None if count.value else "cuDeviceGetCount found no device"
    driver.cuGetErrorString(code, ctypes.byref(name))
    return f"CUDA error {code}: {(name.value or b'unknown').decode()}"


def parse(found: str, processes: str, header: str) -> Accelerators:
    """Parses what ``nvidia-smi`` prints: GPUs and processes as CSV, and its table, which names the driver's CUDA."""
    gpus = []
    drivers = set()
    for line in found.splitlines():
        index, uuid, name, total, used, driver = (field.strip() for field in line.split(",", 5))
        own = tuple(" ".join(fields[1:3]) for fields in _rows(processes) if fields[0] == uuid)
        gpus.append(Gpu(int(index), name, _mib(total), _mib(used), own))
        drivers.add(driver)
    version = re.search(r"CUDA Version:\s*(\d+\.\d+)", header)
    return Accelerators(tuple(gpus), ", ".join(sorted(drivers)) or None, version[1] if version else None)


def _rows(processes: str) -> Iterator[list[str]]:
    for line in processes.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            yield fields


def _mib(text: str) -> int | None:
    # "[N/A]" on GPUs that share the machine's memory.
    return int(text) if text.isdecimal() else None


def _smi(*options: str) -> str:
    done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout


def _message(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi did not end within {_TIMEOUT_S:g} s"
    lines = f"{error.stdout or ''}\n{error.stderr or ''}".strip().splitlines()
    return lines[-1] if lines else f"nvidia-smi ended with {error.returncode}"


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
