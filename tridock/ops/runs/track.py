"""``tridock track``: sends a run's records to trackers, after the run or from a copy."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.codec import encode
from tridock.contracts.records import check_run
from tridock.contracts.trackers import CREDENTIALS, LIBRARIES, find_python
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.experiment import recorded_run
from tridock.extras import install_command
from tridock.ops.runs.recorded_run import Confirm
from tridock.ops.runs.this_machine import node_environment
from tridock.ops.runs.trackers import key_of
from tridock.strict_yaml import validated
from tridock.tracker_settings import Tracker


def track(folders: Sequence[Path], names: Sequence[str], options: Mapping[str, object], confirm: Confirm) -> int:
    """Sends each run to each tracker; returns 0, or 4 if something could not be sent.

    ``options`` are fields of a tracker that override the experiment's. ``confirm`` is asked about an address and a key
    that a run's folder names. Raises :class:`RequestError` with every problem
    of the folders and the settings, and :class:`ClusterError` if a library is missing.
    """
    problems: list[Problem] = []
    wanted: list[tuple[Path, Tracker]] = []
    for folder in folders:
        try:
            wanted += [(folder, tracker) for tracker in _trackers(folder, names, options, confirm)]
        except TridockError as error:
            problems += error.problems
    RequestError.raise_for(problems)
    pythons = {tracker.name: find_python(LIBRARIES[tracker.name]) for _, tracker in wanted}
    missing = [LIBRARIES[name] for name, python in pythons.items() if python is None]
    if missing:
        raise ClusterError(Problem(module, "is not installed", "", install_command(module)) for module in missing)
    failed = False
    for folder, tracker in wanted:
        env = node_environment(1)
        if (key := key_of("--tracker", tracker)) is not None:
            env[CREDENTIALS[tracker.name][0]] = key
        argv = [str(pythons[tracker.name]), "-P", "-m", "tridock.trackers", tracker.name, str(folder)]
        failed |= subprocess.run([*argv, encode(tracker.contract)], env=env, check=False).returncode != 0
    return 4 if failed else 0


def _trackers(folder: Path, names: Sequence[str], options: Mapping[str, object], confirm: Confirm) -> list[Tracker]:
    own: dict[str, Tracker] = {}
    if not (folder / run_folder.LOG_ARGUMENTS).is_file():
        check_run(folder)
        own = {tracker.name: tracker for tracker in recorded_run(folder).trackers}
    if not (chosen := names or list(own)):
        todo = "name one: --tracker wandb, mlflow or tensorboard"
        raise RequestError(Problem(str(folder), "its experiment has no trackers", "", todo))
    place = options.get("address")
    if place is not None and "://" not in str(place):
        options = {**options, "address": os.path.abspath(str(place))}  # noqa: PTH100 - a folder that may not exist
    found, asked = [], []
    for name in chosen:
        given = own[name].model_dump() if name in own else {"name": name}
        named = (field for field in ("address", "variable", "file") if given.get(field) and field not in options)
        asked += [f"send it to {name} with {field}: {given[field]}" for field in named]
        found.append(validated(Tracker, {**given, **options}, f"--tracker {name}"))
    confirm(folder, asked)
    return found
