"""What the processes of a run leave on this node when they are killed: locks of torch's extension builder, and shared
memory. The next attempt would wait for the former, and find less of the latter.

A file is removed only if no process holds it, and a process of the run made it: it was seen to hold it; or its name or
its time says so, where every process that can reach it is visible.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.environment import rank_of
from tridock.contracts.rotated_logs import tail
from tridock.node.agent.processes import find_processes
from tridock.node.probes.build_locks import EXTENSIONS, LOCK, environment_of, extension_folders, locks_in, unheld
from tridock.node.probes.held_files import (
    OwnFile,
    held,
    removed,
    sees_all_users_of,
    sees_all_users_of_shared_memory,
)

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (the names of its files are asked)
_OF_TORCH: Final = re.compile(r"torch_(\d{1,9})_\d+(_\d+)?")
"""torch, ``libshm``: the pid of its maker, and random numbers."""
_OF_NCCL: Final = re.compile(r"nccl-\w+")
_OF_PYTHON: Final = re.compile(r"psm_\w+|sem\.mp-\w+")
"""``multiprocessing``: shared memory, and semaphores."""
_OPENED_NS: Final = 10**9
"""A file exists a moment before its maker has it open: one that is younger is looked at again."""


class Leftovers:
    """Notes what the processes of a run hold while they live, and removes what they have left once they are ended."""

    def __init__(self, run_id: str, shared_memory: Path = SHARED_MEMORY) -> None:
        self._run_id, self._shared_memory = run_id, shared_memory
        self._began_ns = time.time_ns()
        self._pids: set[int] = set()
        self._folders: set[Path] = set()
        self._locks: set[OwnFile] = set()
        self._segments: set[tuple[int, int]] = set()
        self._looked: set[tuple[int, int]] = set()

    def note(self) -> None:
        """Notes the run's processes, and which locks and segments they hold.

        Reads their maps only for segments that are new: that stops a process for a moment.
        """
        pids = [process.pid for process in find_processes(self._run_id) if process.pid != os.getpid()]
        self._pids.update(pids)
        for pid in pids:
            self._folders.update(extension_folders(environment_of(pid)))
            with suppress(OSError):  # ninja and the compilers are at work in the folder, which may be any
                folder = Path("/proc", str(pid), "cwd").readlink()
                if (folder / LOCK).exists():
                    self._folders.add(folder)
        locks, segments = locks_in(self._folders), list(self._files())
        self._locks |= held(self._new(locks), pids)
        self._segments |= {file.number for file in held(self._new(segments), pids)}
        before_ns = time.time_ns() - _OPENED_NS
        self._looked = {file.number for file in (*locks, *segments) if file.changed_ns < before_ns}

    def _new(self, files: Sequence[OwnFile]) -> list[OwnFile]:
        return [file for file in files if file.number not in self._looked]

    def clear(self) -> list[str]:
        """Removes what the run's processes have left; returns the paths."""
        folders = {*self._folders, *extension_folders(os.environ)}
        locks = [it for it in locks_in(folders) if it in self._locks or sees_all_users_of(it.path.parent)]
        segments = [file for file in self._files() if self._is_ours(file)]
        gone = removed(unheld([*locks, *segments]))
        self._began_ns = time.time_ns()
        self._pids.clear()
        self._locks.clear()
        self._segments.clear()
        return sorted(map(str, gone))

    def _files(self) -> Iterator[OwnFile]:
        """Yields this user's files that torch, NCCL or Python has made in the shared memory."""
        with suppress(OSError):
            for path in self._shared_memory.iterdir():
                is_known = any(form.fullmatch(path.name) for form in (_OF_TORCH, _OF_NCCL, _OF_PYTHON))
                if is_known and (file := OwnFile.at(path)) is not None:
                    yield file

    def _is_ours(self, file: OwnFile) -> bool:
        if file.number in self._segments:
            return True
        if not sees_all_users_of_shared_memory() or file.changed_ns < self._began_ns:
            return False
        if match := _OF_TORCH.fullmatch(file.path.name):
            return int(match[1]) in self._pids and not Path(f"/proc/{match[1]}").exists()
        # NCCL has its segments mapped for as long as they have a name. Of Python's, any process may map one later.
        return _OF_NCCL.fullmatch(file.path.name) is not None


_ROOT_PRINTED: Final = re.compile(r"Using (.+) as PyTorch extensions root\.\.\.")
_BATON: Final = "/torch/utils/file_baton.py:"
_END_BYTES: Final = 4096


def lock_waits(folder: Path, ranks: Sequence[int], stacks: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Returns the lock without a holder that each rank waits for, if it does: by its stack. Of a rank that shows none,
    by the end of its output, which is the builder's last line before it waits.
    """
    waiting: dict[int, set[Path]] = {}
    for process in find_processes(folder.name):
        environ = environment_of(process.pid)
        if (rank := rank_of(environ)) is not None:
            waiting.setdefault(rank, set()).update(extension_folders(environ))
    found: dict[int, str] = {}
    for rank in ranks:
        if frames := stacks.get(rank):
            folders = waiting.get(rank, set()) if any(_BATON in frame for frame in frames[:3]) else set()
        else:
            match = _ROOT_PRINTED.search(_last_line(folder, rank))
            folders = set(extension_folders({EXTENSIONS: match[1]})) if match else set()
        if locks := sorted(unheld(locks_in(folders)), key=lambda lock: lock.changed_ns):
            found[rank] = str(locks[0].path)
    return found


def _last_line(folder: Path, rank: int) -> str:
    """Returns the last line of a rank's log, or of all output where it has none."""
    for path in (folder / run_folder.rank_log(rank), folder / run_folder.LAUNCHER_LOG):
        with suppress(OSError):
            lines = tail(path, _END_BYTES).decode(errors="replace").split("\n")
            if found := next((line for line in reversed(lines) if line.strip()), ""):
                return found
    return ""
