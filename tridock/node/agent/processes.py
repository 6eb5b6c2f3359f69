"""The processes of a run on this node: those whose environment names the run. No other process is ever signaled."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tridock.contracts import environment
from tridock.contracts.node_answers import Process, Stopped
from tridock.contracts.run_folder import is_run_id

_PROC = Path("/proc")
_MARKER = f"{environment.RUN_ID}=".encode()
_POLL_S = 0.1
_KILL_POLL_S = 0.01
_PATIENCE_S = 2.0
"""Seconds after the grace period, and after each process that is found for the first time."""
_MOST_PATIENCE_S = 8.0
_TICKS = os.sysconf("SC_CLK_TCK")


def is_deepspeed_runner(argv: Sequence[str]) -> bool:
    """Whether this is DeepSpeed's runner on the head (``python …/bin/deepspeed …``)."""
    if "deepspeed.launcher.runner" in argv[:5]:
        return True
    return any(Path(argument).name in ("deepspeed", "deepspeed.pt", "ds") for argument in argv[:2])


def find_processes(run_id: str | None = None) -> list[Process]:
    """Returns the processes of one run, or of every run on this node, without zombies."""
    return [it for it in _all() if (is_run_id(it.run_id) if run_id is None else it.run_id == run_id)]


def find_runs() -> set[str]:
    """Returns the runs that go on here: they have processes, or a supervisor or an agent, as between two attempts."""
    found = {process.run_id for process in find_processes()}
    for entry in _PROC.iterdir():
        with suppress(OSError, ValueError, IndexError):
            words = (entry / "cmdline").read_text().split("\0")
            verb, folder = words[words.index("tridock.node") + 1 :][:2]
            if verb in ("start", "agent") and is_run_id(name := Path(folder).name):
                found.add(name)
    return found


def _all(foreign: set[int] | None = None) -> Iterator[Process]:
    """Yields every process of a run. Adds other processes to ``foreign``, and skips those that are in it.

    During exec a process shows no environment, and may still turn out to belong to a run.
    """
    uptime = float((_PROC / "uptime").read_text().split()[0])
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or (foreign is not None and int(entry.name) in foreign):
            continue
        try:
            environment = (entry / "environ").read_bytes()
            found = next((v for v in environment.split(b"\0") if v.startswith(_MARKER)), None)
            if found is None:
                if foreign is not None and environment:
                    foreign.add(int(entry.name))
                continue
            command = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            # The command's name is in parentheses and may contain any character: count fields after the last one.
            state, ppid, *fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            # As in proc(5), where state is the third field: 14 utime, 15 stime, 22 starttime.
            user, system, began = (int(fields[number - 5]) for number in (14, 15, 22))
        except (OSError, ValueError):
            continue  # it has ended, or belongs to another user
        if state != "Z":
            argv = tuple(argument.decode(errors="replace") for argument in command)
            run_id = found[len(_MARKER) :].decode(errors="replace")
            yield Process(
                run_id,
                int(entry.name),
                int(ppid),
                argv,
                cpu_s=(user + system) / _TICKS,
                age_s=round(uptime - began / _TICKS, 2),
            )


def stop_processes(run_id: str, grace_s: float) -> Stopped:
    """Ends a run's processes, except the calling one.

    DeepSpeed's runner answers SIGINT and SIGTERM with a ``pkill`` on every node that hits the ranks of *every* run, so
    it alone receives SIGKILL at once. The others receive SIGTERM, and SIGKILL after ``grace_s`` seconds. The next round
    finds processes that were forked meanwhile.
    """
    signalled: set[int] = set()
    # Skipped in later rounds: a round ends before a process that was missed can fork twice.
    foreign: set[int] = set()
    deadline = last_found = time.monotonic() + grace_s
    empty = 0
    # Two empty rounds: a child that is forked while /proc is read can be missed. A killed process takes a moment to
    # finish its I/O, and on a busy machine processes that fork need several rounds.
    while empty < 2 and time.monotonic() < min(last_found + _PATIENCE_S, deadline + _MOST_PATIENCE_S):
        kill = time.monotonic() >= deadline
        empty += 1
        # Signal each process as soon as it is found: one that forks and ends would be gone at the end of the round.
        for process in _others(run_id, foreign):
            empty = 0
            if kill and process.pid not in signalled:
                last_found = time.monotonic()
            if kill or is_deepspeed_runner(process.command):
                _send_signal(process.pid, signal.SIGKILL)
            elif process.pid not in signalled:
                _send_signal(process.pid, signal.SIGTERM)
            signalled.add(process.pid)
        if empty:
            foreign.clear()  # other processes may have their numbers by now
        time.sleep(_KILL_POLL_S if kill or empty else _POLL_S)
    return Stopped(len(signalled), len(list(_others(run_id))))


def _others(run_id: str, foreign: set[int] | None = None) -> Iterator[Process]:
    return (process for process in _all(foreign) if process.run_id == run_id and process.pid != os.getpid())


def _send_signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
