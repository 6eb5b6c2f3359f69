#!/usr/bin/env python3
"""Prints those requirements of a lock (with their hashes) whose distributions this environment does not have.

NVIDIA's images bring their own numpy, protobuf and so on, built against their torch: what they have stays.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path


def requirements(text: str) -> list[tuple[str, str]]:
    """The (name, whole text) of each requirement: a line that starts with a name, and the lines that continue it."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if line and not line.lstrip().startswith("#")]
    return [(re.split(r"[=\s;\[]", line, maxsplit=1)[0], line) for line in lines]


def is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    for name, line in requirements(Path(sys.argv[1]).read_text()):
        if not is_installed(name):
            print(line)


if __name__ == "__main__":
    main()
