"""The kernel's count of processes that it killed in this container because its memory was used up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

COUNTERS: Final = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
"""Files of the container's cgroup with a line ``oom_kill N``: version 2, and version 1."""


def memory_kills(counters: Sequence[Path] = COUNTERS) -> int:
    """Returns the number of kills since the container's start; 0 without a readable counter."""
    for path in counters:
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0
