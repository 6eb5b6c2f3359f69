"""A shell that a host keeps after a command, for the next ones: neither a session nor a shell starts for them. Pure."""

import re
import shlex
from typing import Final

from tridock.command import Command

KEPT: Final = re.compile(rb"\ntridock: kept by (\d+)\n\Z")
"""Printed when a command has succeeded and its shell waits for another; the last of its output. The number is that of
the shell's parent, which with a time limit is its ``timeout``."""
KEPT_BYTES: Final = 40
"""No fewer than it takes."""

KEEP: Final = r"""
while printf '\ntridock: kept by %s\n' "$PPID"; do
  next=
  while IFS= read -r line || exit 0; do
    case $line in
    '>'*) next="$next${line#?}
" ;;
    *) break ;;
    esac
  done
  eval "$next" || exit
  if [ "$line" = last ]; then exit 0; fi
done
"""
"""The end of such a command's script. It reads a script from its input: `>` and a line of it, for each; then ``more``
or ``last``. What follows is the script's own input. A script that fails ends the shell with its exit code."""


def next_script(command: Command, *, last: bool, has_input: bool) -> bytes:
    """Returns what a kept shell reads to run ``command``, which if not ``last`` must read its input up to its end."""
    script = command.render()
    if command.argv[:2] == ("sh", "-c") and not command.env and command.cwd is None:
        script = command.argv[2].removesuffix(KEEP)  # a shell more is a process more
        script = f"set -- {shlex.join(command.argv[4:])}\n{script}"
    if not last:
        script = f"(\n{script}\n){'' if has_input else ' </dev/null'}"
    lines = "".join(f">{line}\n" for line in script.rstrip("\n").split("\n"))
    return f"{lines}{'last' if last else 'more'}\n".encode()
