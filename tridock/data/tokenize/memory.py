"""A process's own memory: how much it has, and how soon glibc's malloc returns what is free."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE: Final = 16 << 20
"""malloc's mmap threshold in bytes, above a chunk's buffers: mapping each of those makes a run a third slower."""


def limit_free_memory() -> None:
    """Makes glibc's malloc return large free blocks immediately, and limits it to two arenas. Forked processes inherit
    this.

    Chunks allocate and free often, so fragmentation adds up. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, 2)


def trim() -> None:
    """Returns free memory to the system, with glibc's malloc."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@contextmanager
def limited_growth(most: int) -> Iterator[None]:
    """Raises MemoryError in the block if this process would need more than ``most`` bytes beyond what it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    now = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limits = [limit for limit in (soft, hard, now + most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def resident() -> int:
    """Returns the memory of this process, in bytes."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[1]) * resource.getpagesize()
    finally:
        os.close(file)
