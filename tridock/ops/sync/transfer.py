"""Files to one host: large ones one by one, so that each can go on where it was cut off, small ones together."""

from __future__ import annotations

import os
import secrets
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from tridock.errors import Problem, RequestError
from tridock.ops.sync.files import DataFile
from tridock.ops.sync.scripts import DAMAGED, list_command, receive_command, unpack_command
from tridock.remote import Host

SMALL: Final = 4 << 20
"""Files below this travel together; nothing of a smaller one is kept when it is cut off."""
_TOGETHER: Final = 64 << 20
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """What a host has of some files, by their names."""

    sha256: Mapping[str, str]
    """Of those with the size asked for."""
    sizes: Mapping[str, int]
    """Of those and of parts that nobody writes."""
    busy: frozenset[str]
    """Parts that somebody writes."""
    strange: tuple[str, ...]
    """What has the name and is no file."""


def held(node: str, host: Host, workspace: str, wanted: Iterable[tuple[str, str]]) -> Held:
    """Asks a host what it has: pairs of a size and a name (see :func:`list_command`)."""
    done = replace(host.run(list_command(workspace, list(wanted))), command="look at its data").checked(node)
    # Not splitlines(): a name may hold what counts as a line's end in some language.
    lines = [line.split("\t") for line in done.stdout.decode(errors="surrogateescape").split("\n")]
    return Held(
        sha256={words[3]: words[1] for words in lines if words[0] == "hash"},
        sizes={words[-1]: int(words[-2]) for words in lines if words[0] in ("hash", "part", "size")},
        busy=frozenset(words[1] for words in lines if words[0] == "held"),
        strange=tuple(words[1] for words in lines if words[0] == "other"),
    )


def part_name(file: DataFile, busy: frozenset[str] = frozenset()) -> str:
    """Where a file arrives, beside its place: named by its content, so that what is there of it can be gone on with."""
    path = PurePosixPath(file.name)
    name = str(path.with_name(f".{path.name}.{file.sha256[:16]}.part"))
    return str(path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")) if name in busy else name


def asked(files: Iterable[DataFile]) -> Iterator[tuple[str, str]]:
    """What to ask a host about these files: their own, and what has arrived of the large ones."""
    for file in files:
        yield str(file.size), file.name
        if file.size >= SMALL:
            yield "part", part_name(file)


def arrived(file: DataFile, there: Held) -> int:
    """Bytes of a file that lie on the host in a part."""
    size = there.sizes.get(part_name(file), 0) if file.size >= SMALL else 0
    return size if size <= file.size else 0


def send(
    node: str, host: Host, workspace: str, files: Sequence[DataFile], there: Held, progress: Callable[[int], object]
) -> None:
    """Sends the files; each appears whole, its content checked, a data set's index after its tokens."""
    names = {file.name for file in files}
    for step in steps(files):
        folder = str(PurePosixPath(step[0].name).parent)
        if step[0].size >= SMALL:
            _send_large(node, host, workspace, step[0], _retired(step[0], names), there, progress)
        else:
            lines = "".join(f"{file.sha256}\t{_retired(file, names) or '-'}\t{file.name}\n" for file in step)
            packed, command = _packed(step, lines), unpack_command(workspace, folder)
            done = host.pipe(packed, command)
            replace(done, command=f"write into {workspace}/{folder}").checked(node)
            progress(sum(file.size for file in step))


def steps(files: Iterable[DataFile]) -> list[tuple[DataFile, ...]]:
    """In the order of sending: indexes after all else, small files of a folder together."""
    made: list[list[DataFile]] = []
    folder, size = "", 0
    for file in sorted(files, key=lambda file: (file.name.endswith(".idx"), file.name.endswith(".sha256"), file.name)):
        parent = str(PurePosixPath(file.name).parent)
        if file.size < SMALL and made and made[-1][-1].size < SMALL and parent == folder and size < _TOGETHER:
            made[-1].append(file)
            size += file.size
        else:
            made.append([file])
            folder, size = parent, file.size
    return [tuple(step) for step in made]


def _retired(file: DataFile, names: set[str]) -> str | None:
    """The index that is not this file's any more, once the file is another: its own comes later."""
    index = f"{file.name.removesuffix('.bin')}.idx"
    return index if file.name.endswith(".bin") and index in names else None


def _send_large(
    node: str,
    host: Host,
    workspace: str,
    file: DataFile,
    retire: str | None,
    there: Held,
    progress: Callable[[int], object],
) -> None:
    part, offset = part_name(file, there.busy), arrived(file, there)
    while True:
        command = receive_command(workspace, file.name, part, offset, file.size, file.sha256, retire)
        done = replace(host.pipe(_chunks(file, offset), command, progress), command=f"write {workspace}/{file.name}")
        if done.exit_code != DAMAGED or not offset:
            done.checked(node)
            return
        # It was the part that was no good: all of it once more.
        progress(offset - file.size)
        offset = 0


def _chunks(file: DataFile, offset: int) -> Iterator[bytes]:
    try:
        with file.source.open("rb") as source:
            source.seek(offset)
            while chunk := source.read(_CHUNK):
                yield chunk
            status = os.fstat(source.fileno())
    except OSError as error:
        raise RequestError(_unreadable(file, error)) from None
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise RequestError(_changed(file))


def _packed(files: Sequence[DataFile], lines: str) -> Iterator[bytes]:
    """A tar of the files by their numbers, and of the list; one of them in memory at a time."""
    for number, file in enumerate(files, 1):
        content = b"".join(_chunks(file, 0))
        yield from _member(str(number), content)
    yield from _member("list", lines.encode(errors="surrogateescape"))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(name: str, content: bytes) -> Iterator[bytes]:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    yield entry.tobuf(tarfile.USTAR_FORMAT)
    yield content
    yield bytes(-len(content) % tarfile.BLOCKSIZE)


def _changed(file: DataFile) -> Problem:
    return Problem(file.name, "changed while it was sent", "", "wait until it is written, then try again")


def _unreadable(file: DataFile, error: OSError) -> Problem:
    return Problem(file.name, "cannot be read", error.strerror or str(error), "make it readable")
