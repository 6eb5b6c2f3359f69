"""The names of files in a checkpoint folder, which the engines write and the supervisor, a launch and a replan read."""

import re
from pathlib import Path
from typing import Final

MANIFEST: Final = "files.json"
"""In every checkpoint: its files with their sizes and hashes. It is written last."""
LAYOUT: Final = "layout.json"
"""In a checkpoint folder of Megatron v1.1.5: the layout that it loads on."""
LATEST: Final = "latest"
"""The pointer of DeepSpeed and of engine ``torch``: the newest checkpoint's folder."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""The pointer of Megatron: the newest checkpoint's iteration."""
ZERO_RANK: Final = re.compile(r"^(?:.*_)?zero_pp_rank_(\d+)_")
"""A file that DeepSpeed writes for one data-parallel rank."""


def zero_file(rank: int, states: str, prefix: str = "") -> str:
    """DeepSpeed's file of one data-parallel rank: ``states`` is ``model`` or ``optim``."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_{states}_states.pt"


def pointed_iteration(pointer: Path, since: float = 0.0) -> int | None:
    """The iteration in a pointer file; None if it is missing, holds no number, or is older than ``since``."""
    try:
        found = re.search(r"(\d+)\s*$", pointer.read_text()) if pointer.stat().st_mtime >= since else None
    except OSError:
        return None
    return int(found[1]) if found else None


def pointed_folder(pointer: Path) -> Path | None:
    """The folder that a pointer file of the kind :data:`LATEST` names; None if there is none."""
    try:
        folder = pointer.parent / pointer.read_text().strip()
    except OSError:
        return None
    return folder if folder.is_dir() and folder != pointer.parent else None
