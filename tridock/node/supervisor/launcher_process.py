"""The launcher of one attempt of a run: a script on the head, whose output is the run's log."""

import os
import subprocess
from pathlib import Path
from typing import Final

from tridock.contracts import environment, run_folder
from tridock.contracts.events import Cause
from tridock.node.supervisor.verdict import Verdict, lost_session, signal_name

_SSH_FAILED: Final = 255


class LauncherProcess:
    """Starts immediately; is the parent of the run's processes on this node."""

    def __init__(self, folder: Path, script: str) -> None:
        # Only the run itself carries the marker: stopping the run must not end the process that records its end.
        env = {**os.environ, environment.RUN_ID: folder.name}
        self._log = folder / run_folder.LAUNCHER_LOG
        with self._log.open("ab") as log:
            self.log_offset = log.tell()
            argv = ["bash", str(folder / script)]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs, negative if a signal ended it."""
        return self._process.poll()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it: the ranks that it started on this node die with it."""
        return (self.exit_code or 0) < 0

    @property
    def has_ranks_exit_code(self) -> bool:
        """Whether its exit code is that of the ranks: not after a signal or a failure of ssh itself."""
        return not self.was_killed and self.exit_code != _SSH_FAILED

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()
            self._process.wait()

    def verdict(self) -> Verdict:
        """Returns the verdict on its early end, before the run was done."""
        code = self.exit_code or 0
        if code < 0:
            return Verdict(Cause.LAUNCHER_EXITED, f"was ended by {signal_name(-code)}", code=128 - code)
        if code == 0:
            # DeepSpeed's runner exits with 0 if a signal killed its child.
            return Verdict(Cause.LAUNCHER_EXITED, "ended with 0, but rank 0 never finished")
        return Verdict(Cause.LAUNCHER_EXITED, f"ended with exit code {code}", code=code)

    def lost_session(self) -> Verdict | None:
        """Returns the verdict on the node whose ssh session it reports as lost."""
        with self._log.open("rb") as log:
            log.seek(self.log_offset)
            return lost_session(log.read())
