"""Shell commands that write and read files on a host, in POSIX sh, with one round trip each. Pure."""

import io
import posixpath
import secrets
import tarfile
from collections.abc import Mapping
from typing import Final

from tridock.command import Command

_SENTINEL: Final = ".all-here"

# ~ is expanded here because every argument is quoted.
_HOME: Final = "case $1 in \\~) p=$HOME;; \\~/*) p=$HOME/${1#\\~/};; *) p=$1;; esac\n"

# Hosts may share the folder over the network, so a pid alone does not identify a writer.
# To the reader a lost connection looks like the end of the input; the size distinguishes them.
_PUT_TREE: Final = (
    "set -eu\n"
    + _HOME
    + 'part=$3; umask "$2"; trap \'rm -rf -- "$p/$part" "$part"\' EXIT; trap "exit 1" HUP INT TERM PIPE\n'
    + 'mkdir -p -- "$p/$part"; cd -- "$p"; [ "$2" != 077 ] || chmod 700 .\n'
    + 'tar -xpomf - -C "$part"\n'
    + f'[ -e "$part/{_SENTINEL}" ] || {{ echo "only part of the files for $p arrived" >&2; exit 1; }}\n'
    + 'shift 3; for f; do d=.; case $f in */*) d=${f%/*}; mkdir -p -- "$d";; esac; mv -f -- "$part/$f" "$d"; done\n'
)


def put_tree_command(files: Mapping[str, bytes], folder: str, mode: int) -> Command:
    """Unpacks a tar from standard input beside the target folder, then renames file by file.

    The folder itself is not replaced, because it may be mounted into a container.
    """
    for name in files:
        if not name or posixpath.normpath(name) != name or posixpath.isabs(name) or name.startswith(".."):
            raise ValueError(f"not a plain path inside a folder: {name!r}")
    part = f".put.{secrets.token_hex(8)}"  # hosts may share the folder over the network
    # The folders of private files are private too; others get the usual mode.
    umask = "077" if mode & 0o077 == 0 else "022"
    return Command.of("sh", "-c", _PUT_TREE, "put", folder, umask, part, *files, stdin=_tar(files, mode))


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        # The sentinel comes last: a stream that is cut at a file boundary unpacks without an error.
        for name, content in {**files, _SENTINEL: b""}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
