"""``python -m tridock.trackers NAME FOLDER [SETTINGS]``: sends the records of a run to one service.

SETTINGS is a tracker as JSON. Without it, the run's ``supervision.json`` applies, until all is delivered.
"""

import os
import sys
from pathlib import Path
from typing import Final

from tridock.contracts.codec import decode
from tridock.contracts.run_state import RunState, state_of
from tridock.contracts.supervision import Supervision
from tridock.contracts.trackers import NOTIFY, Tracker, locked, secrets_file
from tridock.trackers.publish import AFTER_S, publish
from tridock.trackers.publish import Tracker as TrackerSession
from tridock.trackers.subject import of_run, say

_VARIABLES: Final = {
    "WANDB_ERROR_REPORTING": "false",  # reports the library's own use, offline too
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def make_tracker(settings: Tracker) -> TrackerSession:
    for variable, value in _VARIABLES.items():  # the libraries' modules read them
        os.environ.setdefault(variable, value)
    if settings.name == "wandb":
        from tridock.trackers.wandb_tracker import WandbTracker

        return WandbTracker(settings)
    if settings.name == "mlflow":
        from tridock.trackers.mlflow_tracker import MlflowTracker

        return MlflowTracker(settings)
    from tridock.trackers.tensorboard_tracker import TensorboardTracker

    return TensorboardTracker(settings)


def main() -> int:
    """Returns 0 if everything is delivered, 1 if something is not, 2 if another process is delivering it."""
    name, folder, *given = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    with locked(folder, name) as free:
        if not free:
            say(f"{name}: another process sends this run")
            return 2
        if given:
            return _publish(decode(Tracker, given[0]), folder, follow=state_of(folder).is_active)
        supervision = Supervision.read(folder)
        code = _follow(name, folder, supervision)
        if state_of(folder) is RunState.LOST:  # its supervisor no longer exists to remove them
            secrets_file(folder.name).unlink(missing_ok=True)
        return code


def _follow(name: str, folder: Path, supervision: Supervision) -> int:
    if name == NOTIFY:
        from tridock.trackers.notify import notify

        return notify(folder, supervision)
    (settings,) = (tracker for tracker in supervision.trackers if tracker.name == name)
    return _publish(settings, folder, follow=True)


def _publish(settings: Tracker, folder: Path, *, follow: bool) -> int:
    delivered = publish(of_run(folder), make_tracker(settings), follow=follow, patience_s=AFTER_S if follow else 0.0)
    say(f"{settings.name}: {delivered.points} points sent")
    if delivered.reason is None:
        return 0
    say(f"{settings.name}: the rest waits; tridock track {folder} --tracker {settings.name} sends it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
