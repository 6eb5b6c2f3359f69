"""What a rank finds on this node: shared memory, disk, limits, cores, a folder for its run."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (its size is asked)


def space(workspace: Path) -> dict[str, object]:
    """Bytes of /dev/shm and of the runs' disk, all and free; why no run can be written there, or None."""
    runs = workspace / "runs"
    return {"shm": _size(_SHARED_MEMORY), "disk": _size(runs), "unwritable": _unwritable(runs)}


def limits() -> dict[str, object]:
    """Soft limits of a process (None where there is none): locked bytes, open files; and the cores it may use."""
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
    """The system's words where a file with content cannot be made: an empty one fits on a full disk."""
    probe = folder / f".tridock-room-{os.getpid()}"
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
    """Cores that the container's quota comes to; more than any machine has where there is none."""
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 20
