"""Archives that nodes send: downloaded at once, unpacked below one folder, and moved into place."""

import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from tridock.command import Command
from tridock.contracts.files_below import entries, folder_below, open_below, write_below
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.progress import bars
from tridock.remote import Host, raise_failures


def download(
    client: NodeClient,
    commands: Mapping[str, Command],
    folder: Path,
    suffix: str,
    what: str,
    size: int | None,
    timeout: float | None = None,
    optional: Collection[str] = (),
) -> dict[str, Path]:
    """Downloads what a command of each node prints into a file ``NODE`` + suffix of ``folder``, each in ``timeout``
    seconds.

    Raises :class:`ClusterError` with the nodes that could not send all of it; of those that are ``optional`` it prints
    a warning, and returns no file.
    """
    archives = {node: folder / f"{node}{suffix}" for node in commands}
    with ExitStack() as stack, bars(quiet=client.hosts.quiet) as begin:
        bar = begin(what, size)
        # Opened here, not in the hosts' threads, so that no thread leaves a file behind after Ctrl-C.
        files = {node: stack.enter_context(path.open("wb")) for node, path in archives.items()}

        outcomes = client.hosts.try_each(
            lambda node, host: _download(node, host, commands[node], files[node], bar, timeout), only=tuple(archives)
        )
    failed = {node: it.error for node, it in outcomes.items() if node in optional and it.error is not None}
    for error in failed.values():
        print(f"warning: {error}", file=sys.stderr)
    raise_failures({node: it for node, it in outcomes.items() if node not in failed})
    return {node: path for node, path in archives.items() if node not in failed}


def _download(
    node: str, host: Host, command: Command, file: IO[bytes], progress: Callable[[int], None], timeout: float | None
) -> None:
    def write(chunk: bytes) -> None:
        file.write(chunk)
        progress(len(chunk))

    done = host.read_into(write, command, timeout)
    # tar exits with 1 if a file grew while it was read: an active run can be fetched.
    if done.exit_code != 1 or not file.tell():
        done.checked(node)


def unpack(node: str, archive: Path, folder: Path) -> set[str]:
    """Unpacks files and folders below ``folder``, a hard link as a copy; returns the names of everything else."""
    left_out, umask = set[str](), _umask()
    try:
        for entry, content in entries(archive):
            if entry.islnk() and not _is_gits(entry.name):
                content = open_below(folder, entry.linkname)
            if _is_gits(entry.name):
                left_out.add(entry.name)
            elif content is not None:
                mode = 0o777 & ~umask if entry.mode & 0o100 else None
                with content:
                    write_below(folder, entry.name, content, mode, mtime=entry.mtime, durable=False)
            elif entry.isdir():
                with folder_below(folder, entry.name, make=True):
                    pass
            else:
                left_out.add(entry.name)
    except (tarfile.TarError, EOFError, zlib.error, RecursionError, RequestError) as error:
        todo = "remove what it names from the run's folder there, or try again"
        raise ClusterError(Problem(node, "sent an archive that cannot be unpacked", str(error), todo)) from None
    return left_out


def _umask() -> int:
    """Returns this process's umask. Setting it to learn it would change what other threads create meanwhile."""
    with suppress(OSError):
        if found := re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1], 8)
    return 0o077


def _is_gits(name: str) -> bool:
    """Whether a file would make a git repository of its folder, or of a folder without ``.git``.

    A shell's prompt runs git where you look at a run's code, and a repository's configuration names programs to run.
    """
    parts = [part.lower() for part in PurePosixPath(name).parts]
    return ".git" in parts or parts[-1:] == ["head"]


def move(folder: Path, name: str, destination: Path) -> None:
    """Moves ``folder/name`` over an existing copy; new files replace old ones, each atomically, past no link."""
    for path, _, names, source in os.fwalk(folder / name):
        with folder_below(destination, str(Path(path).relative_to(folder)), make=True) as target:
            for it in names:
                os.replace(it, it, src_dir_fd=source, dst_dir_fd=target)
