"""Transfers files to one host: large ones singly and resumable, small ones together, by POSIX sh on the host.

All paths are below the workspace, without tabs or line breaks. Hashes are kept in a file beside the workspace, one
`hash size stamp path` per line. The stamp is inode and times: a changed file has another ctime.
"""

import os
import secrets
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from tridock.command import Command
from tridock.errors import Problem, RequestError
from tridock.ops.sync.files import DataFile
from tridock.remote import Host

DAMAGED: Final = 65
"""The exit code if the received content differs from what was sent."""

_STAMP: Final = "%s\t%i %y %z"
_SAFE: Final = "set -eu; export LC_ALL=C; umask 022\n"
# A lost connection must end the script and let its trap clean up.
_SIGNALS: Final = 'trap "exit 1" HUP INT TERM PIPE\n'

# Empty files, so that a full disk takes them too. What a killed one left is removed an hour later.
_PROBE: Final = (
    _SAFE
    + 'ws=$1 name=$2 make=$3; shift 3\nfor f; do\n  d=$ws/$f; [ "$make" = no ] || mkdir -p -- "$d"\n'
    + '  [ -d "$d" ] || continue\n'
    + "  find \"$d/\" -maxdepth 1 -name '.tridock-probe-*' -mmin +60 -exec rm -f {} + 2>/dev/null || true\n"
    + '  : >"$d/$name"\ndone\n'
)

_SEEN: Final = (
    _SAFE
    + "ws=$1 names=$2; shift 2\nfor f; do\n"
    + '  for name in $names; do [ ! -e "$ws/$f/$name" ] || printf \'seen\\t%s\\t%s\\n\' "$name" "$f"; done\n'
    # The nearest existing folder: a dry run creates none.
    + '  d=$ws/$f; while [ ! -d "$d" ]; do d=$(dirname -- "$d"); done\n'
    + "  free=$(df -Pk -- \"$d\" | awk 'END { for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+%$/) print $(i - 1) }')\n"
    + '  printf \'free\\t%s\\t%s\\n\' "${free:-0}" "$f"\ndone\n'
)

_UNPROBE: Final = 'ws=$1 name=$2; shift 2; for f; do rm -f -- "$ws/$f/$name"; done\n'

_KNOWN: Final = (
    "f == 1 { known[$2 FS $3 FS $4] = $1 } f == 2 { wanted[$2] = $1 } f == 3 {\n"
    '  if ($4 !~ /^regular/) print "other" FS $5\n'
    '  else if (wanted[$5] == "part") print $5 >parts\n'
    '  else if (wanted[$5] != "any" && wanted[$5] != $1) print "size" FS $1 FS $5\n'
    '  else if (($1 FS $2 FS $5) in known) print "hash" FS known[$1 FS $2 FS $5] FS $1 FS $5\n'
    "  else print $1 FS $2 FS ($3 < now - 2) FS $5 >misses\n}"
)

_LIST: Final = (
    _SAFE
    + "cd -- \"$1\" 2>/dev/null || exit 0\ntab=$(printf '\\t')\n"
    + "work=$(mktemp -d); trap 'rm -rf \"$work\"' EXIT\n"
    + _SIGNALS
    + 'cat >"$work/wanted"; : >"$work/misses"; : >"$work/parts"\n'
    + 'if [ -r "$2" ]; then cat -- "$2"; fi >"$work/known"\n'
    + "cut -f 2 \"$work/wanted\" | tr '\\n' '\\0' | "
    + f"xargs -0 stat -L -c '{_STAMP}\t%Z\t%F\t%n' -- >\"$work/stat\" 2>/dev/null || true\n"
    + f'awk -F "$tab" -v now="$(date +%s)" -v misses="$work/misses" -v parts="$work/parts" \'{_KNOWN}\' '
    + 'f=1 "$work/known" f=2 "$work/wanted" f=3 "$work/stat"\n'
    # A part that another process writes is left alone.
    + "while IFS= read -r path; do\n  if flock -n \"$path\" true 2>/dev/null; then printf 'part\\t%s\\t%s\\n' "
    + '"$(($(wc -c <"$path")))" "$path"; else printf \'busy\\t%s\\n\' "$path"; fi\ndone <"$work/parts"\n'
    + 'while IFS="$tab" read -r size stamp settled path; do\n'
    + '  sum=$(sha256sum <"$path"); sum=${sum%% *}; printf \'hash\\t%s\\t%s\\t%s\\n\' "$sum" "$size" "$path"\n'
    + '  [ "$settled" = 0 ] || printf \'%s\\t%s\\t%s\\t%s\\n\' "$sum" "$size" "$stamp" "$path" >>"$2" || true\n'
    + 'done <"$work/misses"\n'
)

_KEEP: Final = (
    f'keep() {{ printf \'%s\\t%s\\t%s\\n\' "$1" "$(stat -L -c \'{_STAMP}\' -- "$2")" "$2" >>"$cache" || true; }}\n'
    # A cache larger than any data folder needs is started over rather than pruned.
    'if [ -f "$cache" ] && [ "$(wc -l <"$cache")" -gt 20000 ]; then rm -f -- "$cache"; fi\n'
)

# Runs that have the old file open continue to read it: a rename takes its name away, not its content. Where both files
# of a data set change, the index goes before the tokens are replaced, and comes last: half of a new pair is no pair.
_PLACE: Final = (
    '  if [ -d "$p" ]; then echo "$p is a folder" >&2; exit 1; fi\n'
    '  [ "$retire" = - ] || rm -f -- "$retire"\n'
    '  mv -f -- "$part" "$p"\n  keep "$sha" "$p"\n'
)

_RECEIVE: Final = (
    _SAFE
    + 'mkdir -p -- "$1"; cd -- "$1"; cache=$2 p=$3 part=$4 offset=$5 size=$6 sha=$7 retire=$8\n'
    + _KEEP
    + 'd=$(dirname -- "$p"); mkdir -p -- "$d"\n'
    + 'exec 9>>"$part"\n'
    + 'if command -v flock >/dev/null && ! flock -n 9; then echo "$p is being sent by another sync" >&2; exit 1; fi\n'
    + 'if [ "$offset" -eq 0 ]; then : >"$part"; fi\n'
    + '[ "$(wc -c <"$part")" -eq "$offset" ] || { echo "$p is being sent by another sync" >&2; exit 1; }\n'
    + _SIGNALS
    + "cat >&9\n"
    + '[ "$(wc -c <"$part")" -eq "$size" ] || { echo "only part of $p arrived" >&2; exit 1; }\n'
    + 'sum=$(sha256sum <"$part")\n'
    + f'[ "${{sum%% *}}" = "$sha" ] || {{ rm -f -- "$part"; echo "$p arrived damaged" >&2; exit {DAMAGED}; }}\n'
    + 'sync -- "$part" 2>/dev/null || sync\n'
    + _PLACE
    # Removes parts of older transfers of this file, unless another process writes them.
    + 'b=.$(basename -- "$p"); for old in "$d/$b".*.part; do\n'
    + '  [ -f "$old" ] || continue\n'
    + '  if command -v flock >/dev/null && ! flock -n "$old" true 2>/dev/null; then continue; fi\n'
    + '  rm -f -- "$old"\ndone\n'
)

_UNPACK: Final = (
    _SAFE
    + 'mkdir -p -- "$1"; cd -- "$1"; cache=$2; mkdir -p -- "$3"; tab=$(printf \'\\t\')\n'
    + _KEEP
    + 'work=$(mktemp -d "$3/.tridock-sync.XXXXXX"); trap \'rm -rf "$work"\' EXIT\n'
    + _SIGNALS
    + 'tar -xof - -C "$work"\n'
    # It comes last: a stream that is cut at a file boundary unpacks without an error.
    + '[ -e "$work/list" ] || { echo "only part of the files for $3 arrived" >&2; exit 1; }\n'
    + 'n=0; while IFS="$tab" read -r sha retire p; do\n  n=$((n + 1)); sum=$(sha256sum <"$work/$n")\n'
    + f'  [ "${{sum%% *}}" = "$sha" ] || {{ echo "$p arrived damaged" >&2; exit {DAMAGED}; }}\n'
    + 'done <"$work/list"\n'
    + 'n=0; while IFS="$tab" read -r sha retire p; do\n  n=$((n + 1)); part=$work/$n\n'
    + _PLACE
    + 'done <"$work/list"\n'
)

_DROP_MAPS: Final = 'set -eu; cd -- "$1" 2>/dev/null || exit 0; rm -f -- "$2"_*_indexmap_*.npy "$2"_indexmap.sha256\n'


def _script(text: str, *arguments: str, stdin: bytes | None = None) -> Command:
    return Command.of("sh", "-c", text, "sync", *arguments, stdin=stdin)


def probe_command(workspace: str, name: str, places: tuple[str, ...], *, make: bool) -> Command:
    """Creates an empty file of this name in each folder; creates or skips missing folders."""
    return _script(_PROBE, workspace, name, "yes" if make else "no", *places)


def seen_command(workspace: str, names: tuple[str, ...], places: tuple[str, ...]) -> Command:
    """Prints ``seen NAME PLACE`` for each of the names in a folder, and ``free KIB PLACE``."""
    return _script(_SEEN, workspace, " ".join(names), *places)


def unprobe_command(workspace: str, name: str, places: tuple[str, ...]) -> Command:
    """Removes the files of :func:`probe_command`."""
    return _script(_UNPROBE, workspace, name, *places)


def list_command(workspace: str, wanted: list[tuple[str, str]]) -> Command:
    """Reports the state of ``wanted``, pairs of size and path, one tab-separated line each.

    ``hash SHA256 SIZE PATH`` if it has that size (or the requested size is ``any``), ``size SIZE PATH`` if it has
    another, ``other PATH`` if it is not a file, and nothing if it is missing. For the size ``part``: ``part SIZE
    PATH``, or ``busy PATH`` while another process writes it.
    """
    lines = "".join(f"{size}\t{path}\n" for size, path in wanted)
    return _script(_LIST, workspace, _cache(workspace), stdin=lines.encode(errors="surrogateescape"))


def receive_command(
    workspace: str, path: str, part: str, offset: int, size: int, sha256: str, retire: str | None
) -> Command:
    """Appends standard input, the rest of the file after ``offset`` bytes, to ``part``, which then becomes the file.

    An interrupted part is kept for the next attempt. ``retire`` is removed just before the file appears.
    """
    arguments = (path, part, str(offset), str(size), sha256, retire or "-")
    return _script(_RECEIVE, workspace, _cache(workspace), *arguments)


def unpack_command(workspace: str, folder: str) -> Command:
    """Unpacks standard input, a tar of the files ``1``, ``2``, … and of ``list``, into a folder.

    A line of the list has a file's hash, the path to retire (or ``-``) and its own path.
    """
    return _script(_UNPACK, workspace, _cache(workspace), folder)


def drop_maps_command(workspace: str, prefix: str) -> Command:
    """Removes the index maps beside a data set, and their marker file."""
    return _script(_DROP_MAPS, workspace, prefix)


def read_command(workspace: str, path: str) -> Command:
    """Returns the command that prints a file of the workspace."""
    return Command.of("cat", "--", f"{workspace}/{path}")


def _cache(workspace: str) -> str:
    return f"{workspace}.hashes"


SMALL: Final = 4 << 20
"""Files below this size in bytes are sent together, and are not resumable."""
_TOGETHER: Final = 64 << 20
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """A host's state of some files, by name."""

    sha256: Mapping[str, str]
    """Hashes of the files with the requested size."""
    sizes: Mapping[str, int]
    """Sizes of those files and of parts that no process writes."""
    busy: frozenset[str]
    """Parts that another process writes."""
    strange: tuple[str, ...]
    """Names that exist but are not files."""


def remote_files(node: str, host: Host, workspace: str, wanted: Iterable[tuple[str, str]]) -> RemoteFiles:
    """Queries a host with pairs of size and name (see :func:`list_command`)."""
    done = replace(host.run(list_command(workspace, list(wanted))), command="look at its data").checked(node)
    # Not splitlines(): a name may contain Unicode line separators.
    lines = [line.split("\t") for line in done.stdout.decode(errors="surrogateescape").split("\n")]
    return RemoteFiles(
        sha256={fields[3]: fields[1] for fields in lines if fields[0] == "hash"},
        sizes={fields[-1]: int(fields[-2]) for fields in lines if fields[0] in ("hash", "part", "size")},
        busy=frozenset(fields[1] for fields in lines if fields[0] == "busy"),
        strange=tuple(fields[1] for fields in lines if fields[0] == "other"),
    )


def part_name(file: DataFile, busy: frozenset[str] = frozenset()) -> str:
    """Returns a file's temporary name, beside its target; derived from its content so that a transfer can resume."""
    path = PurePosixPath(file.name)
    name = str(path.with_name(f".{path.name}.{file.sha256[:16]}.part"))
    return str(path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")) if name in busy else name


def asked(files: Iterable[DataFile]) -> Iterator[tuple[str, str]]:
    """Yields the query for these files: the files themselves, and the parts of large ones."""
    for file in files:
        yield str(file.size), file.name
        if file.size >= SMALL:
            yield "part", part_name(file)


def arrived(file: DataFile, there: RemoteFiles) -> int:
    """Returns the bytes of a file that are on the host in a part."""
    size = there.sizes.get(part_name(file), 0) if file.size >= SMALL else 0
    return size if size <= file.size else 0


def send(
    node: str,
    host: Host,
    workspace: str,
    files: Sequence[DataFile],
    there: RemoteFiles,
    progress: Callable[[int], object],
) -> None:
    """Sends the files; each appears atomically with verified content, a data set's index after its tokens."""
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
    """Returns the files in sending order: indexes last, small files of a folder together."""
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
    """Returns the index that becomes invalid when this file changes; the new index follows later."""
    index = f"{file.name.removesuffix('.bin')}.idx"
    return index if file.name.endswith(".bin") and index in names else None


def _send_large(
    node: str,
    host: Host,
    workspace: str,
    file: DataFile,
    retire: str | None,
    there: RemoteFiles,
    progress: Callable[[int], object],
) -> None:
    part, offset = part_name(file, there.busy), arrived(file, there)
    while True:
        command = receive_command(workspace, file.name, part, offset, file.size, file.sha256, retire)
        done = replace(host.pipe(_chunks(file, offset), command, progress), command=f"write {workspace}/{file.name}")
        if done.exit_code != DAMAGED or not offset:
            done.checked(node)
            return
        # The part was damaged: send the whole file again.
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
    """Yields a tar of the files by number, and of the list; holds one file in memory at a time."""
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
