"""The provenance of a run, for its manifest: code, packages, image, machine."""

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
"""Called with the manifest and plan of a run that is about to start; may raise."""


def provenance(folder: Path) -> dict[str, object]:
    """Returns Tridock's version, the time, and the commit of the repository ``folder`` if git knows one."""
    commit, changes = git_output(folder, "rev-parse", "HEAD"), git_output(folder, "status", "--porcelain")
    return {
        "tridock": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": commit,
        "git_dirty": None if changes is None else changes != "",
    }


def packages() -> dict[str, str]:
    """Returns the installed versions of the packages that affect a run's numbers."""
    found = {}
    for name in ("torch", "deepspeed", "megatron-core", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def image_manifest() -> object:
    """Returns the manifest of the image if this is one of its containers, else None."""
    path = Path(CODE) / "manifest.json"
    return json.loads(path.read_text()) if path.is_file() else None


def machine() -> dict[str, object]:
    """Returns the processor and the number of cores of this machine."""
    return {"processor": _processor(), "cores": os.cpu_count()}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def git_output(folder: Path, *arguments: str) -> str | None:
    """Returns git's output for a folder; None if git is missing or fails, as outside a repository."""
    # Without its optional locks git only reads: a dry run does not write the repository's index.
    argv = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
