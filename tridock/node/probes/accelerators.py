"""This node's GPUs and InfiniBand devices, as the container sees them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FIELDS: Final = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
_TIMEOUT_S: Final = 8.0


def accelerators() -> dict[str, object]:
    """The GPUs with their memory (MiB) and processes, the driver and its CUDA, the InfiniBand devices.

    ``gpus`` is None where there is no ``nvidia-smi``; ``gpu_error`` has its words where it fails.
    """
    infiniband = {
        "devices": sorted(path.name for path in _listed(Path("/sys/class/infiniband"))),
        "usable": any(path.name.startswith("uverbs") for path in _listed(Path("/dev/infiniband"))),
    }
    try:
        found = _smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
        processes = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
        header = _smi()
    except FileNotFoundError:
        return {"gpus": None, "infiniband": infiniband}
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return {"gpus": [], "gpu_error": _words(error), "infiniband": infiniband}
    return {**parse(found, processes, header), "infiniband": infiniband}


def parse(found: str, processes: str, header: str) -> dict[str, object]:
    """Reads what ``nvidia-smi`` prints: the GPUs and their processes as CSV, and its table for the driver's CUDA."""
    gpus: list[dict[str, object]] = []
    drivers = set()
    for line in found.splitlines():
        index, uuid, name, total, used, driver = (word.strip() for word in line.split(",", 5))
        own = [" ".join(words[1:3]) for words in _rows(processes) if words[0] == uuid]
        gpus.append({"index": int(index), "name": name, "total": _mib(total), "used": _mib(used), "processes": own})
        drivers.add(driver)
    version = re.search(r"CUDA Version:\s*(\d+\.\d+)", header)
    return {"gpus": gpus, "driver": ", ".join(sorted(drivers)) or None, "cuda": version[1] if version else None}


def _rows(processes: str) -> Iterator[list[str]]:
    for line in processes.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4:
            yield words


def _mib(text: str) -> int | None:
    # "[N/A]" on GPUs that share the machine's memory.
    return int(text) if text.isdecimal() else None


def _smi(*words: str) -> str:
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout


def _words(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi did not end within {_TIMEOUT_S:g} s"
    lines = f"{error.stdout or ''}\n{error.stderr or ''}".strip().splitlines()
    return lines[-1] if lines else f"nvidia-smi ended with {error.returncode}"


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
