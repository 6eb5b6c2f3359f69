"""The provenance of a run, for its manifest: code, packages, image, machine."""

import json
import os
import platform
import socket
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


def operator() -> str:
    """Returns who runs this command, in the words of ``started_by``: ``user@machine``."""
    return f"{os.environ.get('USER') or os.getuid()}@{socket.gethostname()}"


def provenance(folder: Path) -> dict[str, object]:
    """Returns Tridock's version, who starts a run and when, and the commit of the repository ``folder``, if any."""
    commit, changes = git_output(folder, "rev-parse", "HEAD"), git_output(folder, "status", "--porcelain")
    return {
        "tridock": __version__,
        "started_by": operator(),
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
    # Nor does it run programs that the folder's own .git/config names.
    own = ["-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}"]
    plain = ["--no-ext-diff", "--no-textconv"] if arguments[0] == "diff" else []
    argv = ["git", "--no-optional-locks", *own, "-C", str(folder), arguments[0], *plain, *arguments[1:]]
    try:
        done = subprocess.run(argv, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    # Names may begin with a blank, and lines end with a carriage return, which are theirs.
    return os.fsdecode(done.stdout).removesuffix("\n") if done.returncode == 0 else None
