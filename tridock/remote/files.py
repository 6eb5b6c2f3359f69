"""Shell commands that write and read files on a host, in POSIX sh, with one round trip each. Pure."""

import posixpath
import secrets
import shlex
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

# Text files on standard input, as a script of printf. A shell has it built in: no process shows a key among its
# arguments, and a shell that would have to look for it finds none. tee says why nothing can be written, if the shell
# does not. A folder that is new needs no other beside it: on many hosts every process counts.
_PUT_TEXTS: Final = (
    "set -eu\n"
    + _HOME
    + 'umask 077; text=$(head -c "$2"); case $text in *"all_here=1") ;; '
    + '*) echo "only part of the files for $p arrived" >&2; exit 1;; esac\n'
    + 'path=$PATH; part=$p; [ ! -e "$p" ] || part=$p/$3\n'
    + 'trap \'PATH=$path; rm -rf -- "$part"\' EXIT; trap "exit 1" HUP INT TERM PIPE\n'
    + 'mkdir -p -- "$part"; PATH=/; eval "$text" || '
    + '{ PATH=$path; echo "$text" | tee -- "$part/all" >/dev/null; exit 1; }; PATH=$path\n'
    + '[ "$part" = "$p" ] || { chmod 700 "$p"; mv -f -- "$part"/* "$p"; rmdir -- "$part"; }\n'
    + "trap - EXIT\n"
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


def put_texts_command(files: Mapping[str, bytes], folder: str) -> Command:
    """Writes text files that only their owner may read into a folder, each in one step; reads no input after theirs.

    In as few processes as possible: on many hosts each counts.
    """
    lines = [f'printf %s {shlex.quote(content.decode())} >"$part/{name}"' for name, content in files.items()]
    text = " && ".join((*lines, "all_here=1")).encode()
    part = f".put.{secrets.token_hex(8)}"
    return Command.of("sh", "-c", _PUT_TEXTS, "put", folder, str(len(text)), part, stdin=text)


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
