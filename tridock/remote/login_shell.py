"""How a command passes through a login shell unchanged, whichever that is, and how its answer is found. Pure.

sshd gives the command line to the user's login shell: bash, dash, zsh, fish, csh or tcsh. The line is one that they all
read alike, without newline, ``'``, ``"`` or ``!``. Start-up files may print before the command; marks say where its own
output begins and how it ended.
"""

import math
import re
import threading
from typing import Final

from tridock.command import Command
from tridock.remote.process import Sink

_MARGIN_S: Final = 2
_MOST_NOISE: Final = 1 << 16
_LONGEST_LINE: Final = (1 << 17) - 1
"""Linux's limit for one argument."""


def script_line(script: str) -> str:
    """Returns the line that runs a POSIX shell script in any login shell, in its place and with its input."""
    encoded = "".join(chr(byte) if _is_plain(byte) else f"\\\\0{byte:03o}" for byte in script.encode())
    line = rf"exec sh -c eval\ \"\$\(printf\ %b\ \"\$0\"\)\" {encoded}"
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"a command of {len(line)} bytes: it has to go through standard input")
    return line


def _is_plain(byte: int) -> bool:
    return (chr(byte).isalnum() and byte < 128) or chr(byte) in "_./:,+-"


def limited(command: Command, timeout: float | None) -> str:
    """Returns the command line, wrapped in a time limit if there is one.

    The limit holds even if this side is gone: sshd does not end a command when its connection closes.
    """
    if timeout is None:
        return command.render()
    limit = Command.of("timeout", "-k", "5", str(math.ceil(timeout) + _MARGIN_S))
    if not command.env and command.cwd is None:
        return limit.extended(command.argv).render()
    return limit.extended(("sh", "-c", command.render())).render()


class Marks:
    """The marks around the answer of one command; the sink of its output, which passes on what comes after the mark."""

    def __init__(self, token: str, sink: Sink) -> None:
        self.begun = threading.Event()
        self.noise = bytearray()
        """What came before the mark."""
        self._begin = re.compile(rf"{token}:(\d+)\n".encode())
        self._end = re.compile(rf"{token}=(\d+)\n".encode())
        self._token, self._sink, self._pid = token, sink, ""

    def script(self, command: Command, timeout: float | None, *, merged: bool = False) -> str:
        """Returns the script that runs the command between the marks, its stderr ``merged`` with stdout."""
        begin = f"echo {self._token}:$$; echo {self._token}:$$ >&2"
        line = f"{{ {limited(command, timeout)}\n}} 3>&-{' 2>&1' if merged else ''}"
        return f"{begin}; exec 3>&2; {line}; c=$?; echo {self._token}=$c >&3; exit $c"

    def kill_script(self) -> str:
        """Returns the script that ends the command and everything in its session."""
        return f"pkill -TERM -s {self._pid} || kill -TERM {self._pid}" if self._pid else "true"

    def __call__(self, part: bytes) -> None:
        """Takes a part of what arrives on stdout."""
        if self.begun.is_set():
            self._sink(part)
            return
        self.noise += part
        if found := self._begin.search(self.noise):
            self._pid = found[1].decode()
            rest = bytes(self.noise[found.end() :])
            del self.noise[found.start() :]
            self.begun.set()
            if rest:
                self._sink(rest)
        else:
            del self.noise[:-_MOST_NOISE]

    def before(self, stderr: bytes) -> bytes:
        """Returns what came on stderr before the mark."""
        return self._begin.split(stderr)[0]

    def errors(self, stderr: bytes) -> bytes:
        """Returns the command's own part of stderr."""
        own = stderr[found.end() :] if (found := self._begin.search(stderr)) else stderr
        return self._end.split(own)[0]

    def exit_code(self, stderr: bytes) -> int | None:
        """Returns how the command ended; None if the connection was lost before it did."""
        found = self._end.search(stderr)
        return int(found[1]) if found else None
