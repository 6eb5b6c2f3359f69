"""Files that processes of this node hold: open, or mapped into memory. Read from /proc."""

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_PROC: Final = Path("/proc")
_HOLD_NOTHING: Final = frozenset({"(sd-pam)", "gpg-agent", "ssh", "ssh-agent", "sshd", "sshd-auth", "sshd-session"})
"""Programs that hide their files from their own user, and neither compile nor train; so may process 1."""
_LOCAL: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
# The numbers that Linux gives the first namespaces: include/linux/proc_ns.h.
_FIRST_IPC: Final = "ipc:[4026531839]"
_FIRST_PID: Final = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of this user, and not another one that came to have its name or its number."""

    path: Path
    device: int
    inode: int
    changed_ns: int
    bytes: int

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """Returns the file at ``path``; None if there is none, or if it belongs to another user."""
        try:
            found = path.lstat()
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return None
        return cls(path, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)

    @property
    def number(self) -> tuple[int, int]:
        return self.device, self.inode


def held(files: Collection[OwnFile], pids: Iterable[int] | None = None) -> set[OwnFile]:
    """Returns the files that one of the processes ``pids`` holds.

    Without ``pids``: that any process here holds, or may hold, because it is this user's and hides its files.
    """
    by_number = {file.number: file for file in files}
    names = {file.path.name for file in files}
    mapped = {file.path.name for file in files if file.bytes}
    found: set[OwnFile] = set()
    for pid in _pids() if pids is None and files else pids or ():
        try:
            found |= {by_number[number] for number in _numbers(pid, names, mapped) if number in by_number}
        except PermissionError:
            if pids is None and pid != 1 and _is_own(pid):
                return set(files)
        except OSError:
            continue  # it has ended
        if len(found) == len(files):
            break
    return found


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _numbers(pid: int, names: Collection[str], mapped: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yields device and inode of the files that a process has open with one of these ``names``, or ``mapped``."""
    for descriptor in (_PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):  # closed since
            if descriptor.readlink().name in names:
                opened = descriptor.stat()
                yield opened.st_dev, opened.st_ino
    if not mapped:
        return
    # Each line: addresses, permissions, offset, device, inode, path. A rank has thousands.
    maps = (_PROC / str(pid) / "maps").read_bytes()
    ends = [ending for name in mapped if (ending := b"/%s\n" % os.fsencode(name)) in maps]
    for line in maps.splitlines(keepends=True) if ends else ():
        if line.endswith(tuple(ends)):
            fields = line.split(None, 5)
            major, minor = (int(part, 16) for part in fields[3].split(b":"))
            yield os.makedev(major, minor), int(fields[4])


def _is_own(pid: int) -> bool:
    """Whether a process that hides its files is this user's, and may be one that compiles or trains."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    is_own = str(os.geteuid()) in fields.get("Uid", "").split()
    return is_own and fields.get("State", "Z")[0] not in "ZX" and fields.get("Name") not in _HOLD_NOTHING


def sees_all_users_of(path: Path) -> bool:
    """Whether every process that can reach a file is visible here.

    Not on a file system of several machines, nor for a folder of the host in a container with its own processes.
    """
    if _file_system(path) not in _LOCAL:
        return False
    return _namespace("pid") == _FIRST_PID or _device(path) == _device(Path("/"))


def sees_all_users_of_shared_memory() -> bool:
    """Whether every process that can reach /dev/shm is visible here: not in a container that has the host's."""
    return _namespace("pid") == _FIRST_PID or _namespace("ipc") not in (_FIRST_IPC, "")


def _namespace(kind: str) -> str:
    try:
        return str(Path("/proc/self/ns", kind).readlink())
    except OSError:
        return ""


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


def _file_system(path: Path) -> str:
    """Returns the type of the file system that a path is on; empty if that is unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
        path = path.resolve()
    except (OSError, RuntimeError):
        return ""
    found = (Path("/"), "")
    for line in mounts:
        own, _, source = line.partition(" - ")
        point = Path(_unescaped(own.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= len(found[0].parts):  # of two there, the later is on top
            found = point, source.split()[0]
    return found[1]


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def removed(files: Sequence[OwnFile]) -> list[Path]:
    """Removes the files that are unchanged; returns their paths."""
    gone = []
    for file in files:
        if OwnFile.at(file.path) == file:
            with suppress(OSError):
                file.path.unlink()
                gone.append(file.path)
    return gone
