"""File names in a checkpoint folder. Engines write them; the supervisor, launch and replan read them."""

import itertools
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts.run_folder import read_text, write_atomic

MANIFEST: Final = "files.json"
"""In every checkpoint: lists its files with sizes and hashes. Written last."""
PROGRESS: Final = "tridock.json"
"""In a checkpoint of engines ``torch`` and ``megatron-core``: iteration, model and layout."""
LAYOUT: Final = "layout.json"
"""In a checkpoint folder of Megatron v1.1.5: the layout that can load it."""
LATEST: Final = "latest"
"""Pointer of DeepSpeed and of engine ``torch`` to the newest checkpoint's folder."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's pointer: the newest checkpoint's iteration."""
RELEASE: Final = "release"
"""The folder of a checkpoint of Megatron without an iteration."""
COPIED: Final = ".copied"
"""In the head's checkpoint folder: the iterations whose copies on other nodes need what all nodes have of them."""
_NAME: Final = re.compile(r"^(?:iter_|global_step)(\d+)$")
ZERO_RANK: Final = re.compile(r"^(?:.*_)?zero_pp_rank_(\d+)_")
"""A file that DeepSpeed writes for one data-parallel rank."""


def zero_file(rank: int, states: str, prefix: str = "") -> str:
    """DeepSpeed's file for one data-parallel rank; ``states`` is ``model`` or ``optim``."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_{states}_states.pt"


def newest(folder: Path, since: float = 0.0) -> tuple[int, Path] | None:
    """Returns iteration and folder of the newest checkpoint in ``folder`` with a manifest, or None.

    Ignores checkpoints older than ``since`` (a file's time). Does not read the pointer, which may be damaged.
    """
    found = []
    for iteration, path in saved_in(folder).items():
        with suppress(OSError):
            if (path / MANIFEST).stat().st_mtime >= since:
                found.append((iteration, path))
    return max(found, default=None)


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
    return folder.rename(next(path for path in candidates if not path.exists()))


def write_copied(folder: Path, iterations: Iterable[int]) -> None:
    """Keeps these checkpoints, on every node, from ``train.keep_checkpoints``, until others are given."""
    write_atomic(folder / COPIED, " ".join(map(str, sorted(iterations))).encode())


def read_copied(folder: Path) -> set[int]:
    """Returns the iterations of :func:`write_copied`."""
    return {int(word) for word in read_text(folder / COPIED).split() if word.isdecimal()}


def saved_in(folder: Path) -> dict[int, Path]:
    """Returns the folders of all checkpoints in ``folder`` by iteration, complete or not."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    return {int(match[1]): path for path in paths if (match := _NAME.match(path.name))}
