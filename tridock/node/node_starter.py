"""Starts a script of a run on all of its nodes from the head, and waits for them."""

import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from tridock.contracts import environment, run_folder
from tridock.contracts.events import Cause, append_event
from tridock.contracts.supervision import Supervision
from tridock.errors import RunError
from tridock.node.progress_lines import INTERVAL_S, ProgressLines
from tridock.node.supervisor.verdict import LOGIN_REFUSED, login_refused, signal_name

_OTHERS_S: Final = 3.0
"""Seconds after the first failure in which the other nodes report their own."""
_CHUNK: Final = 1 << 16
_SSH_FAILED: Final = 255
"""ssh's own exit code. The remote command may still run; the node agent reports that."""


def start_nodes(folder: Path, script: str) -> int:
    """Runs ``bash script`` of the run's folder on every node; returns the exit code of the first that failed.

    ``{node_rank}`` in ``script`` is replaced by the node's rank. With several nodes each line of output starts with its
    node. The supervisor ends the nodes that still run after a failure; a lost session is not a failure yet.
    Records the first failure of a run of your own program: its ranks may be known only to its own launcher.
    """
    supervision = Supervision.read(folder)
    last: dict[str, str] = {}
    nodes = tuple(supervision.ranks)
    ended: SimpleQueue[tuple[str, int]] = SimpleQueue()
    for rank, node in enumerate(nodes):
        argv = ["bash", str(folder / script.format(node_rank=rank))]
        command = argv if node == supervision.head else supervision.reach.program(node, *argv)
        prefix = f"{node}: ".encode() if len(nodes) > 1 else b""
        threading.Thread(target=_run, args=(node, command, prefix, ended, last), daemon=True).start()
    code, left = 0, len(nodes)
    while left:
        try:
            node, returned = ended.get(timeout=_OTHERS_S if code not in (0, _SSH_FAILED) else None)
        except Empty:
            break
        left -= 1
        if returned:
            how = _how(returned)
            print(f"tridock: {script.format(node_rank=nodes.index(node))} {how} on {node}", file=sys.stderr, flush=True)
            if returned == _SSH_FAILED and LOGIN_REFUSED.search(last.get(node, "")):
                _append(folder, node, Cause.LOGIN_REFUSED, login_refused(last[node]))
                returned = RunError.exit_code
            elif script == run_folder.SETUP_SCRIPT:
                _record(folder, node, Cause.SETUP_FAILED, how, last)
            elif supervision.observed and code in (0, _SSH_FAILED) and returned != _SSH_FAILED:
                _record(folder, node, Cause.PROGRAM_FAILED, how, last)
            if code in (0, _SSH_FAILED):
                code = 128 - returned if returned < 0 else returned
    return code


def set_up(folder: Path, command: list[str]) -> int:
    """Runs a run's setup on this node, if a scheduler has started this on every node; returns its exit code."""
    node = os.environ.get(environment.NODE, "")
    ended, last = SimpleQueue[tuple[str, int]](), dict[str, str]()
    _run(node, command, b"", ended, last)
    _, returned = ended.get()
    if returned:
        _record(folder, node, Cause.SETUP_FAILED, _how(returned), last)
    return 128 - returned if returned < 0 else returned


def _how(returned: int) -> str:
    return f"was ended by {signal_name(-returned)}" if returned < 0 else f"ended with exit code {returned}"


def _record(folder: Path, node: str, cause: Cause, how: str, last: dict[str, str]) -> None:
    what = "could not be set up: it" if cause is Cause.SETUP_FAILED else "failed: its program"
    reason = f"{what} {how}: {last[node]}" if node in last else f"{what} {how}"
    _append(folder, node, cause, reason)


def _append(folder: Path, node: str, cause: Cause, reason: str) -> None:
    append_event(folder, cause.event, node=node, cause=cause, reason=reason)


def _run(
    node: str, command: list[str], prefix: bytes, ended: "SimpleQueue[tuple[str, int]]", last: dict[str, str]
) -> None:
    """``last``: receives the last line of the node's output with a word in it."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in _lines(process.stdout.fileno()):  # a whole line in one write: those of several nodes never mix
        sys.stdout.buffer.write(prefix + line)
        sys.stdout.buffer.flush()
        if re.search(rb"\w", line):
            last[node] = line.decode(errors="replace").strip()
    ended.put((node, process.wait()))


def _lines(output: int) -> Iterator[bytes]:
    """Yields the lines that are read from a pipe, each with its end; of a progress bar a line now and then."""
    lines = ProgressLines()
    while True:
        if not select.select([output], [], [], INTERVAL_S)[0]:
            yield from filter(None, [lines.state()])
        elif chunk := os.read(output, _CHUNK):
            *whole, endless = lines.add(chunk).split(b"\n")
            yield from (line + b"\n" for line in (*whole, *filter(None, [endless])))
        else:
            break
    if rest := lines.rest():
        yield rest + b"\n"
