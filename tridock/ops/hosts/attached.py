"""Commands that end when this process ends or loses its connection, and a lock on a cluster's nodes made of one."""

import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Final

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.client import NODE, NodeClient
from tridock.ops.hosts.facts import read_states
from tridock.ops.hosts.hosts import Hosts
from tridock.remote import Completed, Host, clock
from tridock.remote.host import remedy_of

_KEEPALIVE: Final = "timeout 60 sh -c 'read -r beat'"
AWAIT_KEEPALIVES: Final = f"while {_KEEPALIVE}; do :; done"
"""The end of an attached command's script: without keepalives from here it exits within a minute."""
_KEEPALIVE_S: Final = 2.0
_END_S: Final = 30.0
FIRST_LINE_S: Final = 30.0
"""Seconds for a host to say whether the lock is free."""

_PATH: Final = "case $1 in '~'/*) lock=$HOME/${1#*/};; *) lock=$1;; esac"
# Without flock two commands may meet, as they always could.
_FLOCK: Final = "! command -v flock >/dev/null 2>&1 || flock"
_LOCK: Final = rf"""
{_PATH}
mkdir -p -- "${{lock%/*}}" && exec 9>>"$lock" || exit 1
{_FLOCK} -n 9 || {{
  echo "waiting $(cut -d ' ' -f 2- "$lock")"
  until flock -n 9; do {_KEEPALIVE} || exit 1; done
}}
env echo "$2 $3" >"$lock" || exit 1
echo locked
{AWAIT_KEEPALIVES}
"""
_LAPSED: Final = 75
# env echo, since a shell's own calls a full disk an I/O error.
# Each host keeps the last command that has claimed its node, and carries out nothing for an earlier one.
_CLAIM: Final = rf"""
{_PATH}
mkdir -p -- "${{lock%/*}}" && exec 8>>"$lock.$3" || exit 1
{_FLOCK} -w 20 8 || {{ echo "another command still changes this node" >&2; exit 1; }}
if [ "$4" = head ] && ! grep -qs "^$2 " "$lock"; then exit {_LAPSED}; fi
env echo "$2" >"$lock.$3"
"""
_CLAIMED: Final = rf"""
{_PATH}
exec 8>>"$lock" || exit 1
{_FLOCK} -w 20 8 || {{ echo "another command still changes this node" >&2; exit 1; }}
grep -qsx "$2" "$lock" || exit {_LAPSED}
shift 2
"$@" 8>&-
"""


class AttachedCommand:
    """A command that ends in :data:`AWAIT_KEEPALIVES`; it runs until :meth:`release`, or the end of this process."""

    def __init__(self, host: Host, command: Command, fails: str) -> None:
        """``fails`` is the problem to report if the command ends by itself."""
        self._host, self._command, self._fails = host, command, fails
        self._stop = threading.Event()
        self._lines: SimpleQueue[str | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def line(self, timeout: float | None = None) -> str:
        """Returns the next line of output. Raises what has ended it, or :class:`ClusterError` if none comes in time."""
        try:
            line = clock.take(self._lines, timeout)
        except Empty:
            todo = "see what delays it there, then try again"
            raise ClusterError(Problem(self._host.name, self._fails, f"no answer within {timeout:g} s", todo)) from None
        if isinstance(line, BaseException):
            raise line
        return line

    def release(self) -> None:
        self._stop.set()

    def end(self) -> None:
        """Lets the command end, and waits for it."""
        self.release()
        self._thread.join(_END_S)

    def _run(self) -> None:
        received = b""

        def on_output(output: bytes) -> None:
            nonlocal received
            *lines, received = (received + output).split(b"\n")
            for line in lines:
                self._lines.put(line.decode(errors="replace"))

        try:
            done = self._host.read_into(on_output, self._command, chunks=self._keepalives())
            error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.exit_code}"
            todo = remedy_of(done.exit_code, error)
            failure: BaseException = ClusterError(Problem(self._host.name, self._fails, error, todo))
        except BaseException as raised:  # for the thread that waits for a line
            failure = raised
        self._lines.put(failure)

    def _keepalives(self) -> Iterator[bytes]:
        while not self._stop.wait(_KEEPALIVE_S):
            yield b"\n"


class NodesLock:
    """The lock on a cluster's nodes. Its holder may be paused, and lose it, at any time: the hosts know who has it."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._token = hosts, secrets.token_hex(8)
        self._file = hosts.transport.lock_file()

    def take(self) -> AttachedCommand:
        """Starts the command that has the lock, or waits for it, until it is released."""
        holder = f"{os.environ.get('USER', 'somebody')} on {socket.gethostname()}, process {os.getpid()}"
        command = Command.of("sh", "-c", _LOCK, "lock", self._file, self._token, holder)
        return AttachedCommand(
            self._hosts[self._hosts.head], command, f"the cluster's nodes cannot be locked ({self._file})"
        )

    def claim(self) -> None:
        """Has every host refuse what earlier commands would still change there. Read the states again after it."""

        def claim(node: str, host: Host) -> None:
            place = "head" if node == self._hosts.head else "other"
            script = Command.of("sh", "-c", _CLAIM, "claim", self._file, self._token, node, place)
            done = replace(host.run(script, timeout=30.0), command="claim the node")
            self._checked(node, done).checked(node)

        self._hosts.each(claim, only=self._hosts.nodes[:1])  # the head first: it knows who has the lock
        self._hosts.each(claim, only=self._hosts.nodes[1:])

    def run(self, node: str, command: Command, timeout: float, host: Host | None = None) -> Completed:
        """Runs a command on the node's host, or on ``host``, as long as no later command has claimed it.

        Raises :class:`ClusterError` once one has.
        """
        guard = ("sh", "-c", _CLAIMED, "claimed", f"{self._file}.{node}", self._token)  # hosts may share a home
        guarded = replace(command, argv=(*guard, *command.argv))
        return self._checked(node, (host or self._hosts[node]).run(guarded, timeout=timeout))

    def node_verb(self, client: NodeClient, *arguments: str, stdin: bytes | None, timeout: float) -> Completed:
        """As :meth:`NodeClient.node_verb` on the head, under the conditions of :meth:`run`."""
        return self.run(client.head, client.inside(client.head, *NODE, *arguments, stdin=stdin), timeout)

    def _checked(self, node: str, done: Completed) -> Completed:
        if done.exit_code != _LAPSED:
            return done
        what = "another command has changed the cluster's nodes since this one was paused"
        todo = "look at tridock status, then run this command again"
        raise ClusterError(Problem(node, what, "its lock lapses after a minute", todo))


@contextmanager
def nodes_locked(hosts: Hosts) -> Iterator[NodesLock]:
    """Allows one command at a time, from any machine, to change a cluster's nodes. The head's host keeps the lock."""
    lock = NodesLock(hosts)
    command = lock.take()
    try:
        _await_lock(hosts, command)
    except BaseException:
        command.release()
        hosts[hosts.head].close()  # the host may hang
        raise
    try:
        yield lock
    finally:
        command.end()


def _await_lock(hosts: Hosts, command: AttachedCommand) -> None:
    try:
        locked = command.line(FIRST_LINE_S)
    except ClusterError:
        read_states(hosts)  # other hosts may fail too: all problems at once
        raise
    if locked.startswith("waiting"):
        who = locked.removeprefix("waiting").strip() or "another machine"
        print(f"another command ({who}) changes the nodes of {hosts.cluster.name}; waiting for it", file=sys.stderr)
        command.line()
