"""The processes of a run on this node: those whose environment names the run. Nothing else is ever touched."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tridock.run_folder import RUN_ID_VARIABLE

_PROC = Path("/proc")
_MARKER = f"{RUN_ID_VARIABLE}=".encode()
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run."""

    run_id: str
    pid: int
    ppid: int
    command: tuple[str, ...]
    rss_bytes: int

    def to_json(self) -> dict[str, object]:
        """For ``json.dumps``."""
        return asdict(self)

    @property
    def is_runner(self) -> bool:
        """Whether this is DeepSpeed's runner on the head (``python …/bin/deepspeed …``)."""
        return any(Path(word).name == "deepspeed" for word in self.command[:2])


def find_processes(run_id: str | None = None) -> list[Process]:
    """The processes of one run, or of every run on this node; zombies are not counted."""
    return [process for process in _all() if run_id is None or process.run_id == run_id]


def _all() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            found = next((v for v in environment.split(b"\0") if v.startswith(_MARKER)), None)
            if found is None:
                continue
            command = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            # The command's name stands in parentheses and may hold anything: fields are counted after the last one.
            state, ppid, *_ = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            pages = int((entry / "statm").read_text().split()[1])
        except (OSError, ValueError):
            continue  # ended meanwhile, or another user's
        if state != "Z":
            words = tuple(word.decode(errors="replace") for word in command)
            run_id = found[len(_MARKER) :].decode(errors="replace")
            yield Process(run_id, int(entry.name), int(ppid), words, pages * os.sysconf("SC_PAGESIZE"))


def stop_processes(run_id: str, grace_s: float) -> tuple[int, int]:
    """Ends a run's processes: how many there were, and how many are left (0 unless the kernel holds one back).

    DeepSpeed's runner answers SIGINT and SIGTERM with a ``pkill`` on every node that hits the ranks of *every* run,
    so it alone gets SIGKILL at once. The others get SIGTERM, and SIGKILL once ``grace_s`` seconds are over.
    """
    seen: set[int] = set()
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    # After the grace, two more seconds: a killed process that does input or output takes a moment to go.
    while (left := find_processes(run_id)) and time.monotonic() < deadline + 2.0:
        late = time.monotonic() >= deadline
        for process in left:
            seen.add(process.pid)
            if process.is_runner or late:
                _kill(process.pid, signal.SIGKILL)
            elif process.pid not in asked:
                asked.add(process.pid)
                _kill(process.pid, signal.SIGTERM)
        time.sleep(_POLL_S)
    return len(seen), len(left)


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
