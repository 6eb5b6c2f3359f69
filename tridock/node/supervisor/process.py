"""A run's supervisor on the head: a separate process that supervises the run and writes ``exit_code``.

It holds the lock of :mod:`tridock.contracts.run_state` until it exits.
"""

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts import appends, heartbeat, process_records, run_folder
from tridock.contracts.file_locks import try_lock, wait_for_lock
from tridock.contracts.lease import EXPIRY_S, HeldLease, LeaseLostError, LeaseWatch
from tridock.contracts.partials import partial_of
from tridock.contracts.run_state import LOCK, RunState, exit_code_of, state_of
from tridock.contracts.supervision import Supervision
from tridock.errors import Problem, RequestError
from tridock.node.agent.node_agent import is_replaced
from tridock.node.agent.processes import find_runs
from tridock.node.queue import kept_out, start_next
from tridock.node.supervisor.run_supervisor import RunSupervisor
from tridock.node.supervisor.trackers import TrackerProcesses

_POLL_S: Final = 0.2
_ROOM_S: Final = 60.0
_LOCK_S: Final = 60.0
_REMOVED: Final = ".{}.removed"
"""A run's folder that is being removed."""


def start(folder: Path, *, again: bool = False, patience_s: float = 0.0) -> int:
    """Starts the run of ``folder`` detached from this session; returns its supervisor's pid once it is running.

    ``again``: a run that ended or was lost continues from its newest checkpoint. A supervisor that outlived its job is
    ended within ``patience_s`` seconds; with 0 the call raises.
    """
    run_id = folder.name
    if not run_folder.is_run_id(run_id):
        raise _refused(str(folder), "is not a run's folder", run_id, "give /workspace/runs/<run-id>")
    for name in (run_folder.LAUNCH_SCRIPT, run_folder.SUPERVISION):
        if not (folder / name).is_file():
            raise _refused(str(folder), f"holds no {name}", "", "start runs with tridock launch or tridock train")
    if again and state_of(folder) is RunState.INCOMPLETE:
        raise _refused(run_id, "was never started", "its launch was interrupted", "begin anew: tridock run")
    with _alone(folder.parent):
        _refuse_port_in_use(folder)
        lock = _taken_again(folder, patience_s) if again else _taken(folder)
    (folder / "logs").mkdir(exist_ok=True)
    log = folder / run_folder.LAUNCHER_LOG
    read, write = os.pipe()
    sys.stdout.flush()
    # A fork, not a new interpreter: the user waits for it.
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os._exit(_detached(log, lambda: supervise(folder, write, again)))
    os.close(write)
    os.close(lock)
    with os.fdopen(read, "rb") as ready:
        if ready.read() != b"started":
            (folder / LOCK).unlink()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            raise _refused(run_id, "could not be started", f"exit code {code}", f"look at {log}")
    return pid


def withdraw(folder: Path, *, ended: bool = False) -> bool:
    """Removes the folder of a run, unless the run was started or is queued; returns whether that is so.

    ``ended``: also of a run that was started, unless it is running, or a running one began from its checkpoint.
    """
    for left in folder.parent.glob(_REMOVED.format("*")):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    if not folder.is_dir():
        return False
    with kept_out(folder) as queued, _alone(folder.parent):
        if queued or (_is_in_use(folder) if ended else (folder / LOCK).exists()):
            return True
        gone = folder.rename(folder.with_name(_REMOVED.format(folder.name)))
    with suppress(FileNotFoundError):  # another removal clears what it takes for left over
        shutil.rmtree(gone)
    return False


def _is_in_use(folder: Path) -> bool:
    """Whether a run is running, or is what a running one began from, which reads its checkpoint at a restart."""
    here = find_runs()

    def is_active(run: Path) -> bool:  # only its head holds the lock, and every node of it has processes
        return state_of(run).is_active or (run.name in here and exit_code_of(run) is None)

    others = (other for other in folder.parent.iterdir() if run_folder.is_run_id(other.name) and other != folder)
    named = f"runs/{folder.name}/"
    began_here = (it for it in others if named in run_folder.read_text(it / run_folder.EXPERIMENT))
    return is_active(folder) or any(map(is_active, began_here))


@contextmanager
def _alone(runs: Path) -> Iterator[None]:
    """Serializes the starts of runs on this node."""
    lock = os.open(runs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # NFS locks no folders
            wait_for_lock(lock, runs, _LOCK_S)
        yield
    finally:
        os.close(lock)


def _refuse_port_in_use(folder: Path) -> None:
    """Raises if the port is in use. A run started a second ago does not listen yet, so its port looks free."""
    ours = Supervision.read(folder)
    for other in folder.parent.iterdir():
        if other == folder or not other.is_dir() or not state_of(other).is_active:
            continue
        with suppress(OSError, ValueError):  # a run of another version
            theirs = Supervision.read(other)
            if (theirs.head, theirs.master_port) == (ours.head, ours.master_port):
                what = f"launch.master_port is that of {other.name}, which is running"
                todo = "leave launch.master_port out, or give each run its own"
                raise _refused(folder.name, what, str(ours.master_port), todo)


def _taken(folder: Path) -> int:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        todo = "launch again: every run has an id of its own"
        raise _refused(folder.name, "has been started already", "", todo) from None
    # Taken before the fork and inherited by the supervisor: the lock belongs to the open file, not the process.
    wait_for_lock(lock, folder / LOCK, _LOCK_S)
    return lock


def _taken_again(folder: Path, patience_s: float) -> int:
    """Takes the lock and removes the records of the run's previous end."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + patience_s
    while not try_lock(lock):
        if time.monotonic() >= deadline:
            os.close(lock)
            raise _refused(folder.name, "is already running", "", "wait for its end, or stop it")
        (folder / run_folder.STOPPED).touch()
        time.sleep(_POLL_S)
    for name in (run_folder.EXIT_CODE, run_folder.STOPPED, run_folder.SIGNALLED):
        (folder / name).unlink(missing_ok=True)
    # Heartbeats and records of the previous attempt must not look like dead ranks of this one.
    process_records.remove(folder)
    for rank in heartbeat.ranks(folder):
        heartbeat.path_of(folder, rank).unlink(missing_ok=True)
    return lock


def take_over(folder: Path, supervision: Supervision, lease: HeldLease, previous: str) -> None:
    """Starts the supervisor on this node, which has the lease but no lock yet, to replace that of ``previous``."""

    def work() -> int:
        _replace_lock(folder)
        return _see_to_end(folder, supervision, lease, lambda supervisor: supervisor.take_over(previous))

    if os.fork() == 0:
        os._exit(_detached(folder / run_folder.LAUNCHER_LOG, work))


def _replace_lock(folder: Path) -> None:
    """Takes a new lock until this process exits: a file server may keep a lost node's lock for a long time."""
    partial = partial_of(folder / LOCK)
    lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    wait_for_lock(lock, partial, _LOCK_S)
    partial.replace(folder / LOCK)


def _detached(log: Path, work: Callable[[], int]) -> int:
    """Runs the supervisor in its own session, with its output in the run's log."""
    try:
        os.setsid()
        null, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        return work()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _refused(where: str, what: str, got: str, todo: str) -> RequestError:
    return RequestError(Problem(where, what, got, todo))


def supervise(folder: Path, ready: int, again: bool) -> int:
    """Runs the supervisor; ``ready`` is the pipe that signals :func:`start` that the run is running.

    The inherited lock stays open until it exits, and is not passed on to the run.
    """
    supervision = Supervision.read(folder)
    prepared_at = supervision.prepared_at or (folder / run_folder.SUPERVISION).stat().st_mtime
    lease = HeldLease.first(folder, supervision.head, prepared_at)

    def begin(supervisor: RunSupervisor) -> None:
        supervisor.begin(supervisor.script() if again else run_folder.LAUNCH_SCRIPT)
        os.write(ready, b"started")
        os.close(ready)

    return _see_to_end(folder, supervision, lease, begin)


def _see_to_end(
    folder: Path, supervision: Supervision, lease: HeldLease, begin: Callable[[RunSupervisor], int | None]
) -> int:
    """Supervises the run to its end and records it; only exits if another node has taken over the run.

    ``begin`` returns the exit code of a run that cannot begin.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    trackers = TrackerProcesses(folder, supervision)
    with RunSupervisor(folder, supervision, lease) as supervisor:

        def note(*_: object) -> None:
            supervisor.observations.preemption_requested = True

        # The supervisor must outlive signals to record the end. Handlers, as the launcher would inherit SIG_IGN.
        signal.signal(signal.SIGTERM, note)
        signal.signal(signal.SIGUSR1, note)
        try:
            code = begin(supervisor)
            trackers.start()
            if code is None:
                code = supervisor.run_to_end()
            lease.check()
        except LeaseLostError as lost:
            print(f"tridock: {lost}", flush=True)
            supervisor.abandon()
            trackers.end()
            return 0
    _record_end(folder, code)
    trackers.close()
    start_next(folder.parent.parent)
    return 0


def _record_end(folder: Path, code: int) -> None:
    """Writes the exit code, waiting for space on a full disk: without it the run would count as lost."""
    while True:
        try:
            if appends.flush(_ROOM_S):
                run_folder.write_atomic(folder / run_folder.EXIT_CODE, f"{code}\n".encode())
                return
        except OSError as error:
            if error.errno not in appends.NO_ROOM:
                raise
            time.sleep(_POLL_S)


_LOOK_S: Final = 1.0
_STAGGER_S: Final = 1.5
_LATEST_S: Final = 9.0


def stand_in(folder: Path, node: str) -> None:
    """Takes over the run once it has no supervisor: waits until the head's lease expires, then supervises it itself.

    All nodes that share the run's folder do that, each a little later than the previous one; one gets the lease. The
    head is among them, as it may have lost only its supervisor.

    Returns when a supervisor is back, when the run has ended, or when this node may not take over.
    """
    supervision = Supervision.read(folder)
    watch = LeaseWatch(folder)
    # Without a lease the folder is this node's alone, and the head's records are not here.
    if not supervision.may_be_taken_over or not watch.token:
        return
    patience = EXPIRY_S + min(_LATEST_S, _STAGGER_S * supervision.watched.index(node))
    others = tuple(name for name in supervision.watched if name != node)
    while exit_code_of(folder) is None and not (folder / run_folder.STOPPED).exists():
        if watch.renewed or is_replaced(folder, node):
            return
        if watch.look() > patience and (taken := HeldLease.take(folder, watch.token, node)) is not None:
            take_over(folder, replace(supervision, head=node, remote=others), taken, supervision.head)
            return
        time.sleep(_LOOK_S)
