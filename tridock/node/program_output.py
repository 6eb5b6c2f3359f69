"""Runs a program and passes its output on until it has ended, whatever else still holds that output."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from tridock.contracts import environment
from tridock.contracts.node_answers import Process
from tridock.node.agent.processes import find_processes

_QUIET_S: Final = 3.0
"""Seconds without output, after the program's end, after which those that hold its output count as left behind."""
_MOST_S: Final = 10.0
"""The same, of those that still print."""
_POLL_S: Final = 0.5
_CHUNK: Final = 1 << 16


def run_program(command: Sequence[str]) -> int:
    """Runs the program; returns its exit code, 128 + N for signal N. Names what it left behind, such as a daemon.

    Signals are sent to all processes of a run, so none is passed on. Raises :class:`OSError` for a program that cannot
    be started.
    """
    # Handlers, as the program would inherit that they are ignored.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    output, ended_at = process.stdout.fileno(), None
    printed_at = time.monotonic()
    while True:
        if select.select([output], [], [], _POLL_S)[0]:
            if not (chunk := os.read(output, _CHUNK)):
                break
            _write(chunk)
            printed_at = time.monotonic()
        if ended_at is None and process.poll() is not None:
            ended_at = time.monotonic()
        now = time.monotonic()
        if ended_at is not None and (now - max(printed_at, ended_at) > _QUIET_S or now - ended_at > _MOST_S):
            names = ", ".join(f"{it.command[0] if it.command else '?'} (pid {it.pid})" for it in _left_behind())
            _write(f"tridock: the program has ended and left {names or 'a process'}: ended with the run\n".encode())
            break
    code = process.wait()
    return 128 - code if code < 0 else code


def _write(chunk: bytes) -> None:
    with suppress(BrokenPipeError):  # the launcher has ended: the agent ends the program, not a closed pipe
        while chunk:
            chunk = chunk[os.write(1, chunk) :]


def _left_behind() -> Iterator[Process]:
    """Yields the run's processes here whose parents have ended, but the copiers of ranks' output and their watchers."""
    found = {process.pid: process for process in find_processes(os.environ.get(environment.RUN_ID, ""))}
    above, pid = set[int](), os.getpid()
    while pid in found:
        above.add(pid)
        pid = found[pid].ppid
    for pid, process in found.items():
        beside = process.command[:2] == ("tee", "-a") or "tridock.node.process_end" in process.command[:4]
        if pid not in above and process.ppid not in found and not beside:
            yield process
