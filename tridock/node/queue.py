"""The queue of runs: one file per queued run on the head; first come, first served for each set of slots.

No process waits. Every command that queues, ends or removes a run, or starts the node, starts the runs that can start.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tridock.contracts import environment, run_folder
from tridock.contracts.appends import append
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.file_locks import wait_for_lock
from tridock.contracts.node_answers import QueuedRun
from tridock.contracts.records import read_object, read_plan, slots_of
from tridock.contracts.run_state import LOCK, state_of
from tridock.contracts.trackers import secrets_file
from tridock.errors import Problem, RequestError

Slots = dict[str, set[int]]
_START_S: Final = 120.0
_LOCK_S: Final = 5 * _START_S
"""Its holder may start several runs."""


def enqueue(folder: Path) -> QueuedRun:
    """Appends a run to the queue, and starts it at once if its slots are free."""
    if (folder / LOCK).exists():
        raise RequestError(Problem(folder.name, "has been started already", "", "launch again"))
    with _queue(folder) as queue:
        last = max((int(path.stem.partition("-")[0]) for path in queue.glob("*.json")), default=-1)
        ticket = {"run_id": folder.name, "since": time.time(), "node": os.environ.get(environment.NODE, "")}
        name = f"{last + 1:08d}-{folder.name}.json"
        run_folder.write_atomic(queue / name, json.dumps(ticket).encode())
        (folder / run_folder.INCOMPLETE).unlink(missing_ok=True)
        _start_next(queue)
        return _described(queue, folder)


def start_next(workspace: Path) -> None:
    """Starts every queued run whose slots are not needed by an active or earlier queued run."""
    if (workspace / "runs" / run_folder.QUEUE).is_dir():
        with _queue(workspace / "runs" / "any") as queue:
            _start_next(queue)


def queue_of(workspace: Path) -> list[QueuedRun]:
    """Returns the queued runs in order."""
    if not (workspace / "runs" / run_folder.QUEUE).is_dir():
        return []
    with _queue(workspace / "runs" / "any") as queue:
        return [_described(queue, folder) for _, folder in _tickets(queue)]


def cancel(folder: Path) -> None:
    """Removes a run from the queue. Raises :class:`RequestError` if it is not queued."""
    with _queue(folder) as queue:
        found = [ticket for ticket, waiting in _tickets(queue) if waiting == folder]
        if not found:
            running = (folder / LOCK).exists()
            what, todo = ("is running", "stop it: tridock stop") if running else ("does not wait", "see tridock status")
            raise RequestError(Problem(folder.name, what, "", todo))
        found[0].unlink()
        secrets_file(folder.name).unlink(missing_ok=True)
        append_event(folder, Event.RUN_STOPPED)
        run_folder.write_atomic(folder / run_folder.EXIT_CODE, f"{run_folder.EXIT_STOPPED}\n".encode())
        _start_next(queue)


@contextmanager
def kept_out(folder: Path) -> Iterator[bool]:
    """Lets no run enter the queue inside the block. Yields whether this one is in it."""
    if not (folder.parent / run_folder.QUEUE).is_dir():
        yield False
        return
    with _queue(folder) as queue:
        yield any(waiting == folder for _, waiting in _tickets(queue))


@contextmanager
def _queue(folder: Path) -> Iterator[Path]:
    """Locks and yields the queue's folder."""
    queue = folder.parent / run_folder.QUEUE
    queue.mkdir(parents=True, exist_ok=True)
    with (queue / "lock").open("w") as lock:
        wait_for_lock(lock.fileno(), queue, _LOCK_S)
        yield queue


def _tickets(queue: Path) -> Iterator[tuple[Path, Path]]:
    """Yields each file with its run's folder, in order. Drops runs whose folder was removed."""
    for path in sorted(queue.glob("*.json")):
        folder = queue.parent / str(read_object(path).get("run_id"))
        if (folder / run_folder.SUPERVISION).is_file() and not (folder / LOCK).exists():
            yield path, folder
        else:
            path.unlink(missing_ok=True)


def _start_next(queue: Path) -> None:
    here = os.environ.get(environment.NODE, "")
    taken = [_slots_of(folder) for folder in _active(queue)]
    for path, folder in list(_tickets(queue)):
        slots = _slots_of(folder)
        # The folder may be shared: each node starts its own runs.
        if not any(_shared(slots, others) for others in taken) and read_object(path).get("node") == here:
            started = _start(folder)
            path.unlink()
            if not started:
                continue
        taken.append(slots)


def _start(folder: Path) -> bool:
    """Starts the run; returns whether it started. A run that cannot start is recorded as failed, with the reason."""
    argv = [sys.executable, "-P", "-m", "tridock.node", "start", str(folder)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S, check=False)
        code, why = done.returncode, done.stderr.decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        code, why = 3, f"it did not start within {_START_S:.0f} s"
    if code:
        secrets_file(folder.name).unlink(missing_ok=True)
        append(folder / run_folder.LAUNCHER_LOG, f"tridock: {why}\n".encode())
        append_event(folder, Event.LAUNCHER_ENDED, exit_code=code, cause=Cause.LAUNCHER_EXITED, reason=why)
        (folder / LOCK).touch()
        run_folder.write_atomic(folder / run_folder.EXIT_CODE, f"{code}\n".encode())
    return code == 0


def _described(queue: Path, folder: Path) -> QueuedRun:
    """Describes a queued run with what it waits for: active runs and earlier queued ones."""
    waits: list[str] = []
    slots, since, node = _slots_of(folder), time.time(), os.environ.get(environment.NODE, "")  # of one that has started
    for active in _active(queue):
        if active != folder and _shared(slots, _slots_of(active)):
            waits.append(active.name)
    for path, other in _tickets(queue):
        if other == folder:
            ticket: Mapping[str, Any] = read_object(path)
            since, node = float(ticket.get("since", 0.0)), str(ticket.get("node", ""))
            break
        if _shared(slots, _slots_of(other)):
            waits.append(other.name)
    shown = {name: tuple(sorted(numbers)) for name, numbers in slots.items()}
    return QueuedRun(folder.name, node, since, shown, tuple(waits), started=(folder / LOCK).exists())


def _active(queue: Path) -> Iterator[Path]:
    folders = (path for path in queue.parent.iterdir() if run_folder.is_run_id(path.name))
    yield from sorted(folder for folder in folders if state_of(folder).is_active)


def _slots_of(folder: Path) -> Slots:
    return {node: set(numbers) for node, numbers in slots_of(read_plan(folder)).items()}


def _shared(slots: Slots, others: Slots) -> bool:
    return any(numbers & others.get(node, set()) for node, numbers in slots.items())
