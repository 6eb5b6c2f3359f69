"""Shell commands that write and read files on a host, in POSIX sh, with one round trip each. Pure."""

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
    + 'part=$3; umask "$2"; trap \'rm -rf -- "$p/$part" "$part"\' EXIT; trap "exit 1" HUP INT TERM PIPE\n'
    # A folder that is made here has its mode from the umask: on many hosts every process counts.
    + 'old=; [ "$2" != 077 ] || [ ! -e "$p" ] || old=1\n'
    + 'mkdir -p -- "$p/$part"; cd -- "$p"; [ -z "$old" ] || chmod 700 .\n'
    + 'tar -xpomf - -C "$part"\n'
    + f'[ -e "$part/{_SENTINEL}" ] || {{ echo "only part of the files for $p arrived" >&2; exit 1; }}\n'
    # One mv for all files of the folder itself.
    + "shift 3\n"
    + 'for f; do shift; case $f in */*) mkdir -p -- "${f%/*}"; mv -f -- "$part/$f" "$f";;\n'
    + '*) set -- "$@" "$part/$f";; esac; done\n'
    + '[ "$#" -eq 0 ] || mv -f -- "$@" .\n'
)

_GET: Final = "set -eu\n" + _HOME + 'cat -- "$p"\n'


def put_command(content: bytes, path: str, mode: int) -> Command:
    """Writes standard input to a temporary file beside the target, checks its size and renames it."""
    return Command.of("sh", "-c", _PUT, "put", path, f"{mode:o}", str(len(content)), _umask(mode), stdin=content)


def put_tree_command(files: Mapping[str, bytes], folder: str, mode: int) -> Command:
    """Unpacks a tar from standard input beside the target folder, then renames file by file.

    The folder itself is not replaced, because it may be mounted into a container.
    """
    for name in files:
        if not name or posixpath.normpath(name) != name or posixpath.isabs(name) or name.startswith(".."):
            raise ValueError(f"not a plain path inside a folder: {name!r}")
    part = f".put.{secrets.token_hex(8)}"  # hosts may share the folder over the network
    return Command.of("sh", "-c", _PUT_TREE, "put", folder, _umask(mode), part, *files, stdin=_tar(files, mode))


def get_command(path: str) -> Command:
    """Returns the command that prints a remote file."""
    return Command.of("sh", "-c", _GET, "get", path)


def _umask(mode: int) -> str:
    # The folders of private files are private too; others get the usual mode.
    return "077" if mode & 0o077 == 0 else "022"


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    parts = list[bytes]()
    # The sentinel comes last: a stream that is cut at a file boundary unpacks without an error.
    for name, content in {**files, _SENTINEL: b""}.items():
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), mode
        # GNU's header takes half the processor time of tarfile's own choice, and on many hosts that counts.
        parts += (entry.tobuf(tarfile.GNU_FORMAT), content, bytes(-len(content) % tarfile.BLOCKSIZE))
    return b"".join((*parts, bytes(2 * tarfile.BLOCKSIZE)))
