"""A run's supervisor on the head: starts ``launch.sh`` on its own, waits for it, writes ``exit_code``.

It holds a lock on ``.supervisor`` in the run's folder as long as it lives: whoever finds neither the lock held nor an
exit code knows that the run was lost, with no process number that a restarted container could have given away again.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tridock import run_folder
from tridock.errors import Problem, RequestError
from tridock.node.events import append_event, has_event

LOCK = ".supervisor"
EXIT_UNFINISHED = 4


def start(folder: Path) -> int:
    """Starts the run of ``folder`` detached from this session; returns its supervisor's pid once it is running."""
    run_id = folder.name
    if not run_folder.is_run_id(run_id):
        raise _refused(str(folder), "is not a run's folder", run_id, "give /workspace/runs/<run-id>")
    if not (folder / run_folder.LAUNCH_SCRIPT).is_file():
        raise _refused(
            str(folder), f"holds no {run_folder.LAUNCH_SCRIPT}", "", "start runs with fab launch or tridock train"
        )
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise _refused(run_id, "has been started already", "", "launch again: every run has an id of its own") from None
    # Held from before the supervisor lives, and inherited by it: the lock is the open file's, not the process's.
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "logs").mkdir(exist_ok=True)
    log = folder / run_folder.LAUNCHER_LOG
    read, write = os.pipe()
    sys.stdout.flush()
    # A fork, not a new interpreter: the user waits for it.
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os._exit(_detached(folder, log, write))
    os.close(write)
    os.close(lock)
    with os.fdopen(read, "rb") as ready:
        if ready.read() != b"started":
            (folder / LOCK).unlink()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            raise _refused(run_id, "could not be started", f"exit code {code}", f"look at {log}")
    return pid


def _detached(folder: Path, log: Path, ready: int) -> int:
    """The supervisor's whole life, in a session of its own; whatever it says goes to the run's log."""
    try:
        os.setsid()
        null, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        return supervise(folder, ready)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _refused(where: str, what: str, got: str, todo: str) -> RequestError:
    return RequestError(Problem(where, what, got, todo))


def supervise(folder: Path, ready: int) -> int:
    """What the supervisor does; ``ready`` is the pipe that tells :func:`start` that the run is going.

    The lock that it inherited is open until it ends, and is not handed on to the run.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Only the run itself carries the marker: stopping the run must not end the one who records its end.
    env = {**os.environ, run_folder.RUN_ID_VARIABLE: folder.name}
    with (folder / run_folder.LAUNCHER_LOG).open("ab") as log:
        script = str(folder / run_folder.LAUNCH_SCRIPT)
        run = subprocess.Popen(["bash", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        os.write(ready, b"started")
        os.close(ready)
        code = _verdict(folder, run.wait())
    if code:
        append_event(folder, "launcher_ended", exit_code=code)
    run_folder.write_atomic(folder / run_folder.EXIT_CODE, f"{code}\n".encode())
    return 0


def _verdict(folder: Path, returned: int) -> int:
    """The run's exit code: what the launcher returned, unless that is not the truth."""
    if (folder / run_folder.STOPPED).exists():
        return run_folder.EXIT_STOPPED
    if returned < 0:
        return 128 - returned
    if returned == 0 and not has_event(folder, "run_finished"):
        # DeepSpeed's runner exits 0 where its own child was killed by a signal.
        print("tridock: the launcher ended with 0, but rank 0 never finished: counted as failed", flush=True)
        return EXIT_UNFINISHED
    return returned


def is_supervised(folder: Path) -> bool:
    """Whether the run's supervisor lives."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        # Shared: two who look at the same moment must not take each other for the supervisor.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def mark_stopped(folder: Path) -> None:
    """Lets the supervisor know that the end of the run is wanted; a node without the folder has nothing to tell."""
    if folder.is_dir() and not (folder / run_folder.EXIT_CODE).exists():
        (folder / run_folder.STOPPED).touch()
        append_event(folder, "run_stopped")


def wait_for_end(folder: Path, timeout_s: float) -> None:
    """Waits until the supervisor, where there is one, has recorded the end of a run whose processes are gone."""
    deadline = time.monotonic() + timeout_s
    while is_supervised(folder) and exit_code_of(folder) is None and time.monotonic() < deadline:
        time.sleep(0.02)


def exit_code_of(folder: Path) -> int | None:
    """The run's exit code, or None while there is none."""
    try:
        return int((folder / run_folder.EXIT_CODE).read_text())
    except FileNotFoundError:
        return None
