"""Trackers and notifications: they send a run's records to services outside its ranks.

Each is a process on the head, ``python -m tridock.trackers NAME FOLDER``, which the supervisor starts. It reads
``metrics.jsonl`` and ``events.jsonl``, and outlives the run until everything is delivered.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.contracts import environment, run_folder
from tridock.contracts.records import read_object
from tridock.contracts.run_state import state_of

FOLDER: Final = ".trackers"
NOTIFY: Final = "notify"
TRACKERS_PYTHON: Final = "/opt/trackers/bin/python"
"""In an image built with the trackers' libraries: a virtual environment separate from the ranks'."""
LIBRARIES: Final = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard", NOTIFY: "apprise"}
"""The module that each tracker imports, which pip installs under the same name."""
CREDENTIALS: Final[Mapping[str, tuple[str, ...]]] = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
}
"""The variables from which a tracker's library reads credentials; a key under another name is passed in the first."""


_PYTHON_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Tracker:
    """A tracker in ``supervision.json``, from ``trackers`` of the experiment or the cluster."""

    name: str
    project: str = "tridock"
    entity: str | None = None
    address: str | None = None
    offline: bool = False

    @property
    def destination(self) -> str:
        """Where it sends a run. A saved position is valid only for the same destination."""
        return json.dumps([self.project, self.entity, self.address, self.offline])


@dataclass(frozen=True, slots=True)
class Notification:
    """An address to notify, in ``supervision.json``: the variable with it, the occasions, messages per hour."""

    variable: str
    events: tuple[str, ...]
    per_hour: int = 6


@dataclass(frozen=True, slots=True)
class Reachable:
    """A node's answer to ``trackers``: modules that no Python there has, and unreachable addresses with the reason."""

    missing: tuple[str, ...]
    unreachable: Mapping[str, str]
    unknown: tuple[str, ...] = ()
    """Variables with an address that apprise cannot parse."""
    has_login: bool = True
    """Whether the node's user is logged in to W&B, if asked."""


def has_wandb_login() -> bool:
    """Whether W&B's library would find a key without the variable."""
    return Path(os.environ.get("NETRC", "~/.netrc")).expanduser().is_file()


def position_file(folder: Path, name: str) -> Path:
    """The file with a tracker's position, from which it continues after a restart."""
    return folder / FOLDER / f"{name}.json"


def log_file(folder: Path, name: str) -> Path:
    return folder / "logs" / f"tracker-{name}.log"


def find_python(module: str) -> str | None:
    """Returns the first Python on this node that is recent enough and has the module, or None."""
    beside = os.environ.get(environment.TRACKERS_PYTHON, str(Path(sys.prefix, "trackers", "bin", "python")))
    found = [TRACKERS_PYTHON, beside, sys.executable, *filter(None, map(shutil.which, ("python", "python3")))]
    script = "import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or u.find_spec(sys.argv[1]) is None)"
    for python in dict.fromkeys(found):
        if os.access(python, os.X_OK):
            with suppress(subprocess.TimeoutExpired):  # on a disk that hangs
                argv = [python, "-P", "-c", script, module]
                if not subprocess.run(argv, capture_output=True, timeout=_PYTHON_S, check=False).returncode:
                    return python
    return None


@contextmanager
def locked(folder: Path, name: str) -> Iterator[bool]:
    """Holds a tracker's lock, so that no two send the same records; yields whether it was free."""
    path = folder / FOLDER / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


_LOOK_S: Final = 0.1


def wait_for_delivery(folder: Path, timeout_s: float) -> tuple[str, ...]:
    """Waits until the trackers of an ended run have ended; returns the names of those that have not."""
    for _ in range(round(timeout_s / _LOOK_S) + 1):  # not by the clock: this process may be stopped meanwhile
        if not (busy := tuple(_busy(folder))):
            break
        time.sleep(_LOOK_S)
    return busy


def _busy(folder: Path) -> Iterator[str]:
    for path in sorted((folder / FOLDER).glob("*.lock")):
        with locked(folder, path.stem) as free:
            if not free:
                yield path.stem


# ---- secrets ----

_STARTED_S: Final = 60.0


def secrets_file(run_id: str) -> Path:
    """The file with a run's secrets for its trackers, on the head, outside every run's folder."""
    return Path.home() / ".tridock" / "secrets" / f"{run_id}.json"


def keep_secrets(folder: Path, secrets: Mapping[str, str]) -> None:
    """Writes the secrets of the run in ``folder``, readable only by their owner."""
    path = secrets_file(folder.name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = {"folder": str(folder.absolute()), "values": dict(secrets)}
    run_folder.write_atomic(path, json.dumps(content).encode(), mode=0o600)


def read_secrets(run_id: str) -> dict[str, str]:
    """Returns the run's secrets, or an empty dict."""
    return dict(read_object(secrets_file(run_id)).get("values", {}))


def remove_leftover_secrets() -> None:
    """Removes secrets that a killed supervisor left: those of runs that are over or whose folder is gone."""
    for path in secrets_file("any").parent.glob("*.json"):
        with suppress(OSError):
            folder = Path(str(read_object(path).get("folder", "")))
            gone = not folder.exists() and folder.parent.is_dir()
            # A run that is restarting has its secrets before it has a supervisor.
            if time.time() - path.stat().st_mtime > _STARTED_S and (gone or state_of(folder).is_over):
                path.unlink()
