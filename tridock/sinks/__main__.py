"""``python -m tridock.sinks NAME FOLDER [SETTINGS]``: sends the records of a run to one service.

SETTINGS is a tracker as JSON. Without it, the run's ``supervision.json`` applies, until all is delivered.
"""

import os
import sys
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.run_state import RunState, state_of
from tridock.contracts.sinks import NOTIFY, Tracker, locked, secrets_file
from tridock.contracts.supervision import Supervision
from tridock.sinks.publish import AFTER_S, publish
from tridock.sinks.publish import Tracker as TrackerSession
from tridock.sinks.subject import of_run, say

_MLFLOW: Final = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def make_tracker(settings: Tracker) -> TrackerSession:
    """Returns the tracker of this name; imports its library."""
    if settings.name == "wandb":
        from tridock.sinks.wandb_tracker import WandbTracker

        return WandbTracker(settings)
    if settings.name == "mlflow":
        for variable, value in _MLFLOW.items():  # MLflow's modules read them
            os.environ.setdefault(variable, value)
        from tridock.sinks.mlflow_tracker import MlflowTracker

        return MlflowTracker(settings)
    from tridock.sinks.tensorboard_tracker import TensorboardTracker

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
        supervision = Supervision.from_json((folder / run_folder.SUPERVISION).read_text())
        code = _follow(name, folder, supervision)
        if state_of(folder) is RunState.LOST:  # its supervisor no longer exists to remove them
            secrets_file(folder.name).unlink(missing_ok=True)
        return code


def _follow(name: str, folder: Path, supervision: Supervision) -> int:
    if name == NOTIFY:
        from tridock.sinks.notify import notify

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
