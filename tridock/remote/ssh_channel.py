"""One command on one channel of an ssh connection: its input, its outputs, its end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from tridock.command import Command
from tridock.remote.host import CHUNK, Progress, Sink

_TICK_S: Final = 0.2
_MARGIN_S: Final = 2
_GONE: Final = (EOFError, OSError, paramiko.SSHException)


class OverdueError(Exception):
    """A command's time limit is over."""


class Sender(threading.Thread):
    """Sends the chunks as fast as the other side takes them; an error of their source is kept for the caller."""

    def __init__(self, channel: Any, chunks: Iterable[bytes], progress: Progress | None) -> None:
        super().__init__(daemon=True)
        self._channel, self._chunks, self._progress = channel, chunks, progress
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for chunk in self._chunks:
                try:
                    # In pieces: paramiko copies what is left of its argument for every packet.
                    for start in range(0, len(chunk), CHUNK):
                        self._channel.sendall(chunk[start : start + CHUNK])
                except _GONE:
                    return  # the command or the connection has ended: the reader learns which
                if self._progress is not None:
                    self._progress(len(chunk))
            with suppress(OSError, EOFError):
                self._channel.shutdown_write()
        except BaseException as error:
            self.failure = error
            _signal(self._channel, "TERM")  # before its input closes: it must not take the part for the whole
            close(self._channel)


def limited(command: Command, timeout: float | None) -> str:
    """The line to run; with a time limit that holds there too, whatever becomes of this side.

    sshd leaves a command running whose channel is closed, and signals none for root.
    """
    if timeout is None:
        return command.render()
    seconds = str(math.ceil(timeout) + _MARGIN_S)
    return Command.of("timeout", "-k", "5", seconds, "sh", "-c", command.render()).render()


class _Bell:
    """What paramiko's buffers set when there is something to read; their clearing would hide the other one's news."""

    def __init__(self) -> None:
        self.rung = threading.Event()

    def set(self) -> None:
        self.rung.set()

    def clear(self) -> None:
        pass


def read_all(channel: Any, sink: Sink, deadline: float | None) -> bytes:
    """Both outputs to their ends: one into ``sink``, the errors returned; OverdueError once the deadline is over."""
    errors, bell = bytearray(), _Bell()
    # Not its fileno(): paramiko closes that under its own writer, which ends the connection.
    channel.in_buffer.set_event(bell)
    channel.in_stderr_buffer.set_event(bell)
    while True:
        bell.rung.clear()
        # Asked first: what came before the end is read after it.
        ended = channel.eof_received or channel.closed
        if channel.recv_ready():
            _take(channel, sink)
        elif channel.recv_stderr_ready():
            errors += received(channel.recv_stderr)
        elif ended and channel.status_event.wait(_TICK_S):
            return bytes(errors)
        elif not ended:
            bell.rung.wait(_TICK_S)
        if deadline is not None and time.monotonic() > deadline:
            raise OverdueError


def _take(channel: Any, sink: Sink) -> None:
    try:
        sink(received(channel.recv))
    except BaseException:
        _signal(channel, "TERM")  # nobody takes what it still has to say
        raise


def received(read: Callable[[int], bytes]) -> bytes:
    """What a channel's ``recv`` or ``recv_stderr`` gives; nothing where the connection is lost, as its end will tell.

    Either also tells the other side that there is room again, and raises where that can no longer be sent.
    """
    try:
        return read(CHUNK)
    except _GONE:
        return b""


def close(channel: Any) -> None:
    """Closes a channel, whether or not the other side can still be told."""
    with suppress(*_GONE):
        channel.close()


def _signal(channel: Any, name: str) -> None:
    """Asks sshd to signal the command (RFC 4254, 6.9): closing the channel alone would leave it running."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("signal")
    message.add_boolean(False)
    message.add_string(name)
    with suppress(Exception):  # it is gone already, or its sshd knows no signals
        channel.transport._send_user_message(message)
