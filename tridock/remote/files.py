"""Shell commands that write and read files on a host: POSIX sh, one round trip each. Pure."""

import io
import posixpath
import tarfile
from collections.abc import Mapping
from typing import Final

from tridock.command import Command

_SENTINEL: Final = ".all-here"

# ~ is expanded by hand: every argument arrives quoted, as it must.
_HOME: Final = "case $1 in \\~) p=$HOME;; \\~/*) p=$HOME/${1#\\~/};; *) p=$1;; esac\n"

# Hosts may share the folder over the network: a process number alone would not tell two writers apart.
# A connection that ends early looks like the end of the input: the size tells the two apart.
_PUT: Final = (
    "set -eu\n"
    + _HOME
    + 'umask "$4"; d=$(dirname -- "$p"); mkdir -p -- "$d"; umask 077\n'
    + 'part=$(mktemp "$d/.put.XXXXXX"); trap \'rm -f "$part"\' EXIT; trap "exit 1" HUP INT TERM PIPE\n'
    + 'cat >"$part"; chmod "$2" "$part"\n'
    + '[ "$(wc -c <"$part")" -eq "$3" ] || { echo "only part of $p arrived" >&2; exit 1; }\n'
    + 'if [ -d "$p" ]; then echo "$p is a folder" >&2; exit 1; fi\n'
    + 'mv -f -- "$part" "$p"\n'
)

_PUT_TREE: Final = (
    "set -eu\n"
    + _HOME
    + 'umask "$2"; mkdir -p -- "$p"; cd -- "$p"; [ "$2" != 077 ] || chmod 700 .\n'
    + 'part=$(mktemp -d .put.XXXXXX); trap \'rm -rf "$part"\' EXIT; trap "exit 1" HUP INT TERM PIPE\n'
    + 'tar -xpomf - -C "$part"\n'
    + f'[ -e "$part/{_SENTINEL}" ] || {{ echo "only part of the files for $p arrived" >&2; exit 1; }}\n'
    + "shift 2\n"
    + 'for f; do case $f in */*) mkdir -p -- "${f%/*}";; esac; mv -f -- "$part/$f" "$f"; done\n'
)

_GET: Final = "set -eu\n" + _HOME + 'cat -- "$p"\n'


def put_command(content: bytes, path: str, mode: int) -> Command:
    """Writes standard input beside its place, checks that all of it came, and renames it."""
    return Command.of("sh", "-c", _PUT, "put", path, f"{mode:o}", str(len(content)), _umask(mode), stdin=content)


def put_tree_command(files: Mapping[str, bytes], folder: str, mode: int) -> Command:
    """Unpacks a tar from standard input beside its place, then renames file by file.

    The folder itself stays what it is: it may be mounted into a container.
    """
    for name in files:
        if not name or posixpath.normpath(name) != name or posixpath.isabs(name) or name.startswith(".."):
            raise ValueError(f"not a plain path inside a folder: {name!r}")
    return Command.of("sh", "-c", _PUT_TREE, "put", folder, _umask(mode), *files, stdin=_tar(files, mode))


def get_command(path: str) -> Command:
    return Command.of("sh", "-c", _GET, "get", path)


def _umask(mode: int) -> str:
    # Private files make private folders; anything else follows the common habit.
    return "077" if mode & 0o077 == 0 else "022"


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        # The sentinel comes last: a stream that was cut at a file's end unpacks without a complaint.
        for name, content in {**files, _SENTINEL: b""}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
