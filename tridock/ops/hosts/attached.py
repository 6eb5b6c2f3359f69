"""Commands that end when this process ends or loses its connection, and a lock on a cluster's nodes made of one."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.session import Session
from tridock.remote import Host
from tridock.remote.host import remedy_of

AWAIT_KEEPALIVES: Final = "while timeout 60 sh -c 'read -r beat'; do :; done"
"""The end of an attached command's script: without keepalives from here it exits within a minute."""
_KEEPALIVE_S: Final = 2.0
_END_S: Final = 30.0

# Without flock two commands may meet, as they always could.
_LOCK = rf"""
case $1 in '~'/*) lock=$HOME/${{1#*/}};; *) lock=$1;; esac
mkdir -p -- "${{lock%/*}}" && exec 9>>"$lock" || exit 1
if command -v flock >/dev/null 2>&1; then flock -n 9 || {{ echo waiting; flock 9; }}; fi
echo locked
{AWAIT_KEEPALIVES}
"""


class AttachedCommand:
    """A command that ends in :data:`AWAIT_KEEPALIVES`; it runs until :meth:`release`, or the end of this process."""

    def __init__(self, host: Host, command: Command, fails: str, ended: Callable[[], object] = lambda: None) -> None:
        """``fails`` is the problem to report if the command ends by itself. If it had printed a line, ``ended`` is then
        called, in another thread."""
        self._host, self._command, self._fails, self._ended = host, command, fails, ended
        self._stop = threading.Event()
        self._lines: SimpleQueue[str | ClusterError] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def line(self, timeout: float | None = None) -> str:
        """Returns the next line of output. Raises :class:`ClusterError` if it ends, or prints no line in time."""
        try:
            line = self._lines.get(timeout=timeout)
        except Empty:
            todo = "see what delays it there, then try again"
            raise ClusterError(Problem(self._host.name, self._fails, f"no answer within {timeout:g} s", todo)) from None
        if isinstance(line, ClusterError):
            raise line
        return line

    def release(self) -> None:
        """Lets the command end."""
        self._stop.set()

    def end(self) -> None:
        """Lets the command end, and waits for it."""
        self.release()
        self._thread.join(_END_S)

    def _run(self) -> None:
        received, lines = bytearray(), 0

        def on_output(output: bytes) -> None:
            nonlocal lines
            received.extend(output)
            while b"\n" in received:
                line, _, rest = bytes(received).partition(b"\n")
                received[:] = rest
                lines += 1
                self._lines.put(line.decode(errors="replace"))

        try:
            done = self._host.exchange(self._keepalives(), on_output, self._command)
            error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.exit_code}"
            todo = remedy_of(done.exit_code, error)
            failure = ClusterError(Problem(self._host.name, self._fails, error, todo))
        except ClusterError as lost:
            failure = lost
        if lines and not self._stop.is_set():
            self._ended()
        self._lines.put(failure)

    def _keepalives(self) -> Iterator[bytes]:
        while not self._stop.wait(_KEEPALIVE_S):
            yield b"\n"


@contextmanager
def nodes_locked(session: Session, meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Allows one command at a time, from any machine, to change a cluster's nodes. The head's host keeps the lock.

    ``meanwhile`` is called while the lock is on its way.
    """
    host = session.hosts[session.head]
    lock = Command.of("sh", "-c", _LOCK, "lock", session.transport.lock_file())
    command = AttachedCommand(host, lock, "the cluster's nodes cannot be locked")
    try:
        meanwhile()
        try:
            locked = command.line()
        except ClusterError:
            session.states()  # other hosts may fail too: all problems at once
            raise
        if locked == "waiting":
            print(f"another command changes the nodes of {session.cluster.name}; waiting for it", file=sys.stderr)
            command.line()
            session.forget_states()
        yield
    finally:
        command.end()
