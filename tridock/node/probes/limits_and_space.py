"""Shared memory, disk space, resource limits and cores of this node."""

import os
import resource
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts.node_answers import Space
from tridock.contracts.run_folder import FOLDER_ID
from tridock.errors import reason_of

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_MEMORY: Final = Path("/proc/meminfo")
_MEMORY_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (its size is asked)


def shared_memory() -> Space | None:
    """Returns the size of ``/dev/shm``; None if it is missing."""
    return space(_SHARED_MEMORY)


def space(folder: Path) -> Space | None:
    """Returns the size of a folder's file system; None if the folder is missing."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def write_error(folder: Path) -> str | None:
    """Returns the error of writing a non-empty file (an empty one fits on a full disk), or None."""
    probe = folder / f".tridock-space-{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * 4096)
    except OSError as error:
        return reason_of(error).lower()
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def write_problem(folder: Path) -> str:
    """Returns why this user cannot write files below a folder, which may not exist yet; empty if they can."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"no permission to write in {there}"


def folder_identity(folder: Path) -> str:
    """Returns a name that is equal on the nodes that see the same folder; empty where this node cannot write.

    Makes the folder, and the file in it that has the name, where there is none.
    """
    own, mark = (folder / f"{FOLDER_ID}{suffix}" for suffix in (f".{secrets.token_hex(8)}", ""))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(secrets.token_hex(16))
        try:
            mark.hardlink_to(own)  # with its content, and only if no other node has made it
        except FileExistsError:
            pass
        except OSError:  # the file system has no hard links
            if not mark.exists():
                own.rename(mark)
        return mark.read_text()
    except OSError:
        return ""
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)


def soft_limit(which: int) -> int | None:
    """Returns a soft limit of this process; None if it is unlimited."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def memory() -> int | None:
    """Returns the bytes of the host's memory, or the container's limit if that is lower; None if they are unknown."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemTotal:"))
        found.append(int(line.split()[1]) * 1024)
    for limit in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # ValueError: "max"
            found.append(int(limit.read_text()))
    return min(found, default=None)


def cores() -> int:
    """Returns the cores that this container may use: by its CPU affinity and its quota."""
    return min(len(os.sched_getaffinity(0)), _quota())


def _quota() -> int:
    """Returns the container's CPU quota in cores; 1 << 20 without one."""
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 20
