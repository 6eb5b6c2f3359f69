"""A rank of a user's own program that compiles an extension with torch: ``python built.py FOLDER SEGMENT``."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from torch.utils.cpp_extension import load


def hold(segment: Path) -> mmap.mmap:
    """Makes a segment of shared memory and maps it, as NCCL does."""
    with segment.open("xb+") as file:
        file.truncate(mmap.PAGESIZE)
        return mmap.mmap(file.fileno(), mmap.PAGESIZE)


if __name__ == "__main__":
    folder, segment = Path(sys.argv[1]), Path(sys.argv[2])
    rank = os.environ["RANK"]
    held = hold(segment.with_name(f"{segment.name}{rank}"))
    (folder / f"maps-{rank}").touch()
    load("added", [str(folder / "added.cpp")], verbose=True, is_python_module=False)
    segment.with_name(f"{segment.name}{rank}").unlink()
    (folder / f"built-{rank}").touch()
