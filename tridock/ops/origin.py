"""Where a run comes from: the code's version and commit, for its manifest."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tridock import __version__

Approve = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Looks at the manifest and the plan of a run that is about to start, and may raise."""


def origin(folder: Path) -> dict[str, object]:
    """What a manifest begins with; ``folder`` is the repository, or None is known of the commit."""
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    return {
        "tridock": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": commit,
        "git_dirty": None if changes is None else changes != "",
    }


def _git(folder: Path, *words: str) -> str | None:
    # Without its optional locks git only reads: a dry run leaves the repository's index alone, too.
    argv = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
