"""File names in a checkpoint folder. Engines write them; the supervisor, launch and replan read them."""

import itertools
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts.partials import is_folder

MANIFEST: Final = "files.json"
"""In every checkpoint: lists its files with sizes and hashes. Written last."""
ILL: Final = "ill"
"""In the manifest of a checkpoint from which no training continues: what was not finite, see ``Illness``."""
PROGRESS: Final = "tridock.json"
"""In a checkpoint of engines ``torch`` and ``megatron-core``: iteration, model, layout and training."""
LAYOUT: Final = "layout.json"
"""In a checkpoint of Megatron v1.1.5: the layout that can load it, and its training."""
LATEST: Final = "latest"
"""Pointer of DeepSpeed and of engine ``torch`` to the newest checkpoint's folder."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's pointer: the newest checkpoint's iteration."""
RELEASE: Final = "release"
"""The folder of a checkpoint of Megatron without an iteration."""
PART: Final = "part"
"""``.CHECKPOINT.part``: the folder in which one is written, or which it becomes before it is removed."""
OLD: Final = "old"
"""``.CHECKPOINT.old``: a checkpoint whose place another of its name takes."""
_NAME: Final = re.compile(r"^(?:iter_|global_step)(\d+)$")
ZERO_RANK: Final = re.compile(r"^(?:.*_)?zero_pp_rank_(\d+)_")
"""A file that DeepSpeed writes for one data-parallel rank."""


def zero_file(rank: int, states: str, prefix: str = "") -> str:
    """DeepSpeed's file for one data-parallel rank; ``states`` is ``model`` or ``optim``."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_{states}_states.pt"


def newest(folder: Path, since: float = 0.0) -> tuple[int, Path] | None:
    """Returns iteration and folder of the newest checkpoint in ``folder`` with a manifest, or None.

    One in ill health counts only if there is no other. Ignores checkpoints older than ``since`` (a file's time). Does
    not read the pointer, which may be damaged.
    """
    found = []
    for iteration, path in saved_in(folder).items():
        with suppress(OSError):
            if (path / MANIFEST).stat().st_mtime >= since:
                found.append((iteration, path))
    found.sort(reverse=True)
    return next((it for it in found if not _is_ill(it[1])), next(iter(found), None))


def _is_ill(folder: Path) -> bool:
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and ILL in content


def checkpoint_name(name: str) -> bool:
    """Whether a folder with this name is one checkpoint."""
    return _NAME.match(name) is not None or name == RELEASE


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder holds checkpoints, complete or not, a pointer to one, or the files of one."""
    if checkpoint_name(folder.name):
        return folder.is_dir() and any(folder.iterdir())
    if any((folder / pointer).is_file() for pointer in (LATEST, TRACKER)):
        return True
    return any(any(path.iterdir()) for path in saved_in(folder).values() if path.is_dir())


def set_aside(folder: Path) -> Path:
    """Renames a checkpoint so that nothing loads, overwrites or removes it; returns its new path."""
    candidates = (folder.with_name(f"{folder.name}.set-aside-{number}") for number in itertools.count(1))
    return folder.rename(next(path for path in candidates if not os.path.lexists(path)))


def hidden(checkpoint: Path, kind: str) -> Path:
    """Returns the temporary name, of :data:`PART` or :data:`OLD`, of a checkpoint's folder."""
    return checkpoint.with_name(f".{checkpoint.name}.{kind}")


def left_hidden(folder: Path, kind: str) -> list[Path]:
    """Returns the checkpoints that have a folder of their temporary name in ``folder``."""
    names = [path.name[1:].removesuffix(f".{kind}") for path in folder.iterdir() if path.name.endswith(f".{kind}")]
    return [folder / name for name in names if _NAME.match(name) and is_folder(hidden(folder / name, kind))]


def saved_in(folder: Path) -> dict[int, Path]:
    """Returns the folders of all checkpoints in ``folder`` by iteration, complete or not."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    return {int(match[1]): path for path in paths if (match := _NAME.match(path.name))}
