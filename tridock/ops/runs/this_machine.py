"""This machine as a node: its GPUs, and how to run a verb of ``tridock.node`` here."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from tridock.contracts import environment
from tridock.contracts.codec import decode
from tridock.contracts.devices import MIG, VISIBLE, listed_devices
from tridock.errors import ClusterError, Problem
from tridock.gpus import Gpu
from tridock.ops.hosts.facts import least_gpu
from tridock.remote import clock

T = TypeVar("T")

CODE_FOLDER: Final = Path(__file__).parents[3]
"""The folder with the package: the repository, or the image's folder."""


def node_argv() -> list[str]:
    """Returns the command prefix of a ``tridock.node`` verb."""
    return [sys.executable, "-P", "-m", "tridock.node"]


def node_environment(ranks: int) -> dict[str, str]:
    """Returns the environment of processes on this machine; ``ranks`` share its cores."""
    devices = chosen_devices()
    # The ranks import this package from this process's environment.
    return {
        **os.environ,
        **({} if devices is None else {environment.DEVICES: ",".join(devices)}),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        # Ranks that each use all cores slow each other down.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "PYTHONPATH": ":".join(filter(None, [str(CODE_FOLDER), os.environ.get("PYTHONPATH")])),
    }


def ask_here(kind: type[T], *arguments: str, **options: Any) -> T:
    """Returns the answer of a ``tridock.node`` verb on this machine; ``options`` as of :func:`node_output`."""
    return decode(kind, node_output(*arguments, **options))


def node_output(
    *arguments: str,
    stdin: bytes = b"",
    workspace: Path | None = None,
    where: str = "this machine",
    timeout: float | None = None,
) -> bytes:
    """Returns what a ``tridock.node`` verb prints here, run in ``workspace``. Raises :class:`ClusterError`."""
    argv, env, verb = [*node_argv(), *arguments], node_environment(1), arguments[0]
    try:
        done = clock.run(argv, timeout, stdin=stdin, env=env, cwd=workspace)
    except subprocess.TimeoutExpired:
        todo = "look at the disk of its folder, then run it again"
        raise ClusterError(Problem(where, f"{verb} has not ended in {timeout:g} s", "", todo)) from None
    if done.returncode:
        got = done.stderr.decode(errors="replace").strip()[-800:]
        raise ClusterError(Problem(where, f"tridock.node {verb} failed", got, "look at the message"))
    return done.stdout


def default_ranks() -> int:
    """Returns one rank per GPU or MIG slice of ``CUDA_VISIBLE_DEVICES``, or else of the machine; two for CPU training,
    which covers the code paths that need several ranks."""
    return gpu_count() or 2


def free_port() -> int:
    """Returns a TCP port that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def chosen_devices() -> Sequence[str] | None:
    """Returns the devices in ``CUDA_VISIBLE_DEVICES``, or all MIG slices if there are any; None for all GPUs."""
    if (visible := os.environ.get(VISIBLE)) is not None:
        return [name for name in visible.split(",") if name]
    listed = _listed()
    return listed if any(uuid.startswith(MIG) for uuid in listed) else None


def gpu_count() -> int | None:
    """Returns the number of GPUs or MIG slices for ranks here, one each; None if ranks train on the CPU.

    ``CUDA_VISIBLE_DEVICES`` selects GPUs; it has no effect on a machine without any.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not _listed():
        return None
    devices = chosen_devices()
    return len(_listed() if devices is None else devices) or None


def hidden_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Returns the number of the NVIDIA driver's GPUs if ranks here would silently train on the CPU.

    A container sees the host's driver in /proc even without the container toolkit.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get(VISIBLE) == "" or _listed():
        return 0
    return len(list(driver.glob("*")))


def gpu_here() -> Gpu | None:
    """Returns what each of the ranks' GPUs has at least; None on the CPU, and for MIG slices."""
    devices = chosen_devices()
    slices = devices is not None and any(name.startswith(MIG) for name in devices)
    if os.environ.get("DS_ACCELERATOR") == "cpu" or slices or devices == []:
        return None
    chosen = [f"--id={','.join(devices)}"] if devices else []
    return least_gpu(_nvidia_smi("--query-gpu=memory.total,name", "--format=csv,noheader,nounits", *chosen))


@cache
def _listed() -> tuple[str, ...]:
    return listed_devices("\n".join(_nvidia_smi("--list-gpus")))


def _nvidia_smi(*options: str) -> list[str]:
    """Returns the lines that nvidia-smi prints; none on a machine without GPUs."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
