#!/usr/bin/env python3
"""Prints those requirements of a lock (with their hashes) that an environment on top of a base image still needs.

    missing-requirements.py LOCK          what is not there at all
    missing-requirements.py --unfit LOCK  what is there in a version that a package in this environment cannot use

NVIDIA's images bring their own numpy, protobuf and so on, built against their torch: what they have stays, and is used.
Only where a package that was added on top needs another version is that one put in front of the base's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# Built against the base's torch, or torch itself: another version would be a different image.
KEPT = re.compile(r"torch.*|triton|numpy|nvidia-.*|cuda-.*|apex|transformer-engine.*")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(text: str) -> dict[str, str]:
    """The whole text of each requirement by name: a line that starts with a name, and the lines that continue it.

    Where a name has several, one for each range of Python versions, all of them are kept together.
    """
    joined = re.sub(r"\\\n\s*", " ", text)
    found: dict[str, str] = {}
    for line in joined.splitlines():
        if line and not line.lstrip().startswith("#"):
            name = normalized(re.split(r"[=\s;\[]", line, maxsplit=1)[0])
            found[name] = f"{found[name]}\n{line}" if name in found else line
    return found


def is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def version_of(name: str) -> str:
    """The version that is in sight, or 0 where its metadata has none."""
    return str(metadata.distribution(name).metadata.json.get("version", "0"))


def own_distributions() -> Iterator[metadata.Distribution]:
    """The distributions of this environment itself, without those of the base below it."""
    for distribution in metadata.distributions():
        if str(distribution.locate_file("")).startswith(sys.prefix):
            yield distribution


def unfit() -> Iterator[tuple[str, str]]:
    """The (package, requirement) pairs of this environment that the versions in sight do not fulfil."""
    from packaging.requirements import Requirement  # the base has it; the lock, where it does not

    for distribution in own_distributions():
        for text in distribution.requires or ():
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            if is_installed(wanted.name) and not wanted.specifier.contains(version_of(wanted.name), prereleases=True):
                yield normalized(wanted.name), f"{distribution.metadata['Name']} wants {text}"


def main() -> None:
    lock = requirements(Path(sys.argv[-1]).read_text())
    if sys.argv[1] != "--unfit":
        print("\n".join(line for name, line in lock.items() if not is_installed(name)))
        return
    replaced: dict[str, str] = {}
    for name, why in unfit():
        version = version_of(name)
        if name in lock and KEPT.fullmatch(name) is None:
            print(f"the locked {name} goes in front of the base's {version}: {why}", file=sys.stderr)
            replaced[name] = lock[name]
        else:
            print(f"the base's {name} {version} stays, although {why}", file=sys.stderr)
    print("\n".join(replaced.values()))


if __name__ == "__main__":
    main()
