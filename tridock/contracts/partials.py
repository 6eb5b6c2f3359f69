"""Temporary names: a file or folder is made under one and renamed once it is whole. A kill leaves it behind.

``.NAME.PID.HEX.part``, a file
    Becomes NAME (:func:`partial_of`). The only writer of NAME removes what was left (:func:`remove_left_files`).
``.NAME.PID.HEX.part``, a folder
    What is in it becomes NAME (:func:`partial_folder`). The next such writer removes those whose writers have ended.
``.CHECKPOINT.part`` and ``.CHECKPOINT.old``, folders
    A checkpoint that is being written, removed or replaced (``tridock.contracts.checkpoints``).

Each is recognised by its name and its type: anything else of that name, a link too, is not Tridock's and stays.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tridock import interrupts
from tridock.contracts.file_locks import wait_for_lock

_LOCK: Final = "lock"
_LOCK_S: Final = 60.0


def partial_of(path: Path, number: int | None = None, token: str | None = None) -> Path:
    """Returns a temporary name beside ``path`` that no other process uses, or the one of a number and a token.

    Processes on two nodes that share the folder may have the same id, so each name has a random token too.
    """
    number = os.getpid() if number is None else number
    return path.parent / f"{_start(path)}{number}.{token or secrets.token_hex(4)}.part"


def is_folder(path: Path) -> bool:
    """Whether it is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove_left_files(path: Path) -> None:
    """Removes the temporary files of ``path``. Only for its only writer; one that cannot be removed stays."""
    for left in _left(path):
        if left.is_file() and not left.is_symlink():
            with suppress(OSError):
                left.unlink()


def remove_left_folders(path: Path) -> None:
    """Removes the temporary folders of ``path`` whose writers have ended: nobody has their locks."""
    for left in _left(path):
        with suppress(OSError):  # a file; a folder of something else; a writer that lives
            with (left / _LOCK).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_folder(left):
                shutil.rmtree(left, ignore_errors=True)  # once the lock is closed: NFS keeps open files


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Makes a temporary folder beside ``path``; removes it at the end, unless it was renamed.

    First removes those of writers that were killed. A writer has the lock of its own as long as it lives.
    """
    remove_left_folders(path)
    partial = partial_of(path)
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        with (partial / "new").open("wb") as lock:
            with suppress(OSError):  # a file system without locks: nobody removes it
                wait_for_lock(lock.fileno(), partial, _LOCK_S)
            (partial / "new").rename(partial / _LOCK)  # so that no other process gets it before
            (partial / "new").mkdir()
            yield partial / "new"
    finally:
        with interrupts.delayed():
            shutil.rmtree(partial, ignore_errors=True)


def _left(path: Path) -> list[Path]:
    form = re.compile(rf"{re.escape(_start(path))}\d+\.[0-9a-f]{{8}}\.part")
    return [it for it in path.parent.iterdir() if form.fullmatch(it.name)] if path.parent.is_dir() else []


def _start(path: Path) -> str:
    """A name of 255 bytes, the most that Linux has, leaves no room for more."""
    return f".{os.fsdecode(os.fsencode(path.name)[:220])}."
