"""The names of files in a checkpoint folder, which the engines write and the supervisor, a launch and a replan read."""

import re
from contextlib import suppress
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
_NAME: Final = re.compile(r"^(?:iter_|global_step)(\d+)$")
ZERO_RANK: Final = re.compile(r"^(?:.*_)?zero_pp_rank_(\d+)_")
"""A file that DeepSpeed writes for one data-parallel rank."""


def zero_file(rank: int, states: str, prefix: str = "") -> str:
    """DeepSpeed's file of one data-parallel rank: ``states`` is ``model`` or ``optim``."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_{states}_states.pt"


def newest(folder: Path, since: float = 0.0) -> tuple[int, Path] | None:
    """The iteration and the folder of the newest complete checkpoint in ``folder``, by its manifest; None without one.

    Those from before ``since`` (a file's time) do not count. The pointer is not asked: it may be spoiled.
    """
    found = []
    for iteration, path in saved_in(folder).items():
        with suppress(OSError):
            if (path / MANIFEST).stat().st_mtime >= since:
                found.append((iteration, path))
    return max(found, default=None)


def saved_in(folder: Path) -> dict[int, Path]:
    """The folders of all checkpoints in ``folder`` by their iteration, complete or not."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    return {int(match[1]): path for path in paths if (match := _NAME.match(path.name))}
