"""The processes that send a run's records to trackers and notifications, watched by the supervisor."""

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Final

from tridock.contracts import environment
from tridock.contracts.supervision import Supervision
from tridock.contracts.trackers import LIBRARIES, NOTIFY, find_python, log_file, read_secrets, secrets_file

_POLL_S: Final = 0.5
_BACKOFF_S: Final = (2.0, 10.0, 60.0)


class TrackerProcesses:
    """Starts a process for each tracker, and restarts one that was killed. They end by themselves after the run."""

    def __init__(self, folder: Path, supervision: Supervision) -> None:
        self._folder = folder
        self._names = [tracker.name for tracker in supervision.trackers] + [NOTIFY] * bool(supervision.notify)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, list[float]] = {name: [] for name in self._names}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        if self._names:
            self._thread.start()

    def close(self) -> None:
        """Stops watching them; their secrets remain in their environment, and no longer on the disk."""
        self._closed.set()
        if self._names:
            self._thread.join()
            secrets_file(self._folder.name).unlink(missing_ok=True)

    def end(self) -> None:
        """Ends them: another node now sends the run's records."""
        self._closed.set()
        if self._names:
            self._thread.join()
        for process in self._processes.values():
            process.terminate()

    def _watch(self) -> None:
        # An error here must not affect the run. Each tracker has its own log.
        while not self._closed.wait(_POLL_S if self._processes else 0.0):
            for name in self._names:
                process = self._processes.get(name)
                if process is None or (process.poll() not in (None, 0) and self._is_due(name)):
                    self._start(name)

    def _is_due(self, name: str) -> bool:
        starts = self._starts[name]
        return time.monotonic() - starts[-1] > _BACKOFF_S[min(len(starts), len(_BACKOFF_S)) - 1]

    def _start(self, name: str) -> None:
        self._starts[name].append(time.monotonic())
        env = {key: value for key, value in os.environ.items() if key not in environment.OF_A_RUN}
        try:
            module = LIBRARIES[name]
            with log_file(self._folder, name).open("ab") as log:
                if (python := find_python(module)) is None:
                    log.write(f"{module}: is not installed; pip install {module}\n".encode())
                    self._names = [other for other in self._names if other != name]
                    return
                self._processes[name] = subprocess.Popen(
                    [python, "-P", "-m", "tridock.trackers", name, str(self._folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env | read_secrets(self._folder.name),
                    start_new_session=True,
                )
        except OSError as error:  # the disk is full
            print(f"tridock: {name} cannot be started: {error.strerror}", flush=True)
