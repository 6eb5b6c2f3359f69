"""Locks of torch's builder of C++ and CUDA extensions that no process holds any more.

``FileBaton`` of torch (``torch/utils/file_baton.py``) makes the file ``lock`` in an extension's folder, keeps it open
while it compiles, and removes it. Killed meanwhile, it leaves the file, and every later process waits for that without
limit. The owner of a lock is hence the process that has it open. The locks of Inductor and Triton are the kernel's
(flock), which end with their process.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts.node_answers import BuildLock
from tridock.node.probes.held_files import OwnFile, held

LOCK: Final = "lock"
EXTENSIONS: Final = "TORCH_EXTENSIONS_DIR"
_CACHE: Final = "torch_extensions"


def extension_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yields the folders of extensions that a process with this environment builds: ``<root>/<name>``.

    Without ``TORCH_EXTENSIONS_DIR`` they are ``<cache>/torch_extensions/<Python and CUDA>/<name>``.
    """
    if root := environ.get(EXTENSIONS):
        yield from _folders(Path(root))
        return
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or Path.home()}/.cache"
    for version in _folders(Path(cache) / _CACHE):
        yield from _folders(version)


def _folders(root: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def locks_in(folders: Iterable[Path]) -> list[OwnFile]:
    """Returns this user's locks of the builder in extensions' folders; such a file is empty."""
    found = (OwnFile.at(folder / LOCK) for folder in folders)
    return [lock for lock in found if lock is not None and lock.bytes == 0]


_RELEASE_S: Final = 0.1
"""Seconds between two looks: a lock is closed a moment before it is removed."""


def unheld(files: Iterable[OwnFile]) -> list[OwnFile]:
    """Returns the files that stay and that no process of this node holds."""
    files = list(files)
    for pause_s in (0.0, _RELEASE_S):
        if files:
            time.sleep(pause_s)
            files = [file for file in files if OwnFile.at(file.path) == file]
            busy = held(files)
            files = [file for file in files if file not in busy]
    return files


def stale_locks(environ: Mapping[str, str] = os.environ) -> tuple[BuildLock, ...]:
    """Returns the locks of this user that no process of this node holds, with the seconds since they were made."""
    return tuple(described(unheld(locks_in(extension_folders(environ)))))


def described(locks: Iterable[OwnFile]) -> Iterator[BuildLock]:
    """Yields paths and ages of locks, the oldest first."""
    now = time.time()
    for lock in sorted(locks, key=lambda it: it.changed_ns):
        yield BuildLock(str(lock.path), round(max(0.0, now - lock.changed_ns / 1e9), 1))


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment that a process began with; empty once it has ended."""
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    return {}
