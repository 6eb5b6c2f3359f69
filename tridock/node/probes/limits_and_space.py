"""Shared memory, disk space, resource limits and cores of this node."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (its size is asked)


def space(workspace: Path) -> dict[str, object]:
    """Total and free bytes of /dev/shm and of the disk of ``runs/``; the error that writing there gives, or None."""
    runs = workspace / "runs"
    return {"shm": _size(_SHARED_MEMORY), "disk": _size(runs), "unwritable": _unwritable(runs)}


def limits() -> dict[str, object]:
    """Soft limits of a process (None if unlimited): locked bytes, open files, and the cores that it may use."""
    return {
        "memlock": _soft(resource.RLIMIT_MEMLOCK),
        "files": _soft(resource.RLIMIT_NOFILE),
        "cores": min(len(os.sched_getaffinity(0)), _quota()),
    }


def _size(path: Path) -> dict[str, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {"bytes": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _unwritable(folder: Path) -> str | None:
    """The error of writing a file with content, or None; an empty one fits on a full disk."""
    probe = folder / f".tridock-space-{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * 4096)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def _soft(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _quota() -> int:
    """The container's CPU quota in cores; 1 << 20 without one."""
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 20
