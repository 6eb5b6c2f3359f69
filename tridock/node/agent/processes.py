"""The processes of a run on this node: those whose environment names the run. Nothing else is ever touched."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tridock.contracts import environment

_PROC = Path("/proc")
_MARKER = f"{environment.RUN_ID}=".encode()
_POLL_S = 0.1
_LATE_POLL_S = 0.01
_PATIENCE_S = 2.0
"""After the grace, and after each process that is found for the first time."""
_MOST_PATIENCE_S = 8.0
_PAGE = os.sysconf("SC_PAGESIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run; ``cpu_s`` counts the processor time it has used, ``age_s`` the time since it began."""

    run_id: str
    pid: int
    ppid: int
    command: tuple[str, ...]
    rss_bytes: int
    cpu_s: float
    age_s: float

    def to_json(self) -> dict[str, object]:
        """For ``json.dumps``."""
        return asdict(self)

    @property
    def is_runner(self) -> bool:
        """Whether this is DeepSpeed's runner on the head (``python …/bin/deepspeed …``)."""
        if "deepspeed.launcher.runner" in self.command[:5]:
            return True
        return any(Path(word).name in ("deepspeed", "deepspeed.pt", "ds") for word in self.command[:2])


def find_processes(run_id: str | None = None) -> list[Process]:
    """The processes of one run, or of every run on this node; zombies are not counted."""
    return [process for process in _all() if run_id is None or process.run_id == run_id]


def _all(foreign: set[int] | None = None) -> Iterator[Process]:
    """Every process of a run; those that are of none are added to ``foreign``, and left out where they are in it.

    One in the middle of its exec shows no environment at all: nobody knows yet whose it is.
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
            # The command's name stands in parentheses and may hold anything: fields are counted after the last one.
            state, ppid, *fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            # As in proc(5), where state is the third field: 14 utime, 15 stime, 22 starttime, 24 rss.
            user, system, began, pages = (int(fields[number - 5]) for number in (14, 15, 22, 24))
        except (OSError, ValueError):
            continue  # ended meanwhile, or another user's
        if state != "Z":
            argv = tuple(argument.decode(errors="replace") for argument in command)
            run_id = found[len(_MARKER) :].decode(errors="replace")
            yield Process(
                run_id,
                int(entry.name),
                int(ppid),
                argv,
                rss_bytes=pages * _PAGE,
                cpu_s=(user + system) / _TICKS,
                age_s=round(uptime - began / _TICKS, 2),
            )


def stop_processes(run_id: str, grace_s: float) -> tuple[int, int]:
    """Ends a run's processes: how many there were, and how many are left (0 unless the kernel holds one back).

    DeepSpeed's runner answers SIGINT and SIGTERM with a ``pkill`` on every node that hits the ranks of *every* run,
    so it alone gets SIGKILL at once. The others get SIGTERM, and SIGKILL once ``grace_s`` seconds are over. Whoever
    was forked meanwhile is found in the next round. The process that asks is never among them.
    """
    asked: set[int] = set()
    # Those need not be looked at again and again: a round is over before a process that was missed can fork twice.
    foreign: set[int] = set()
    deadline = over = time.monotonic() + grace_s
    empty = 0
    # Twice none: a child forked while the list is read can hide from it. A killed process that does input or output
    # takes a moment to go, and where the machine is busy those that fork need more than one round.
    while empty < 2 and time.monotonic() < min(over + _PATIENCE_S, deadline + _MOST_PATIENCE_S):
        late = time.monotonic() >= deadline
        empty += 1
        # Each is signalled as soon as it is found: one that forks and ends would be gone once the list is whole.
        for process in _others(run_id, foreign):
            empty = 0
            if late and process.pid not in asked:
                over = time.monotonic()
            if process.is_runner or late:
                asked.add(process.pid)
                _kill(process.pid, signal.SIGKILL)
            elif process.pid not in asked:
                asked.add(process.pid)
                _kill(process.pid, signal.SIGTERM)
        if empty:
            foreign.clear()  # their numbers may be others' by now
        time.sleep(_LATE_POLL_S if late or empty else _POLL_S)
    return len(asked), len(list(_others(run_id)))


def _others(run_id: str, foreign: set[int] | None = None) -> Iterator[Process]:
    return (process for process in _all(foreign) if process.run_id == run_id and process.pid != os.getpid())


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
