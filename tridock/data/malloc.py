"""glibc's allocator, told to give memory back: chunks come and go by the thousand, and their holes would add up."""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE: Final = 1 << 20


def return_what_is_freed() -> None:
    """From now on blocks of a megabyte are the system's again once they are freed, and threads share two arenas.

    For this process and what it forks. Where the C library is another one nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, 2)


def trim() -> None:
    """Gives back what is free at the moment."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
