"""Where a run comes from, for its manifest: code, packages, image, machine."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tridock import __version__
from tridock.contracts.run_folder import CODE

Approve = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Looks at the manifest and the plan of a run that is about to start, and may raise."""


def provenance(folder: Path) -> dict[str, object]:
    """Tridock's version, the time, and the commit of the repository ``folder`` where git knows one."""
    commit, changes = git_output(folder, "rev-parse", "HEAD"), git_output(folder, "status", "--porcelain")
    return {
        "tridock": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": commit,
        "git_dirty": None if changes is None else changes != "",
    }


def packages() -> dict[str, str]:
    """The installed versions of the packages that a run's numbers depend on."""
    found = {}
    for name in ("torch", "deepspeed", "megatron-core", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def image_manifest() -> object:
    """The versions in the image that this machine is a container of; None where it is none."""
    path = Path(CODE) / "manifest.json"
    return json.loads(path.read_text()) if path.is_file() else None


def machine() -> dict[str, object]:
    return {"processor": _processor(), "cores": os.cpu_count()}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def git_output(folder: Path, *arguments: str) -> str | None:
    """What git says of a folder; None where git is missing or fails, as outside of a repository."""
    # Without its optional locks git only reads: a dry run leaves the repository's index alone, too.
    argv = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
