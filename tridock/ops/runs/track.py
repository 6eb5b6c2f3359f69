"""``tridock track``: sends a run's records to trackers, after the run or from a copy."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.codec import encode
from tridock.contracts.records import check_run
from tridock.contracts.sinks import CREDENTIALS, EXTRAS, find_python
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.experiment import is_command, load_command, load_experiment
from tridock.ops.runs.sinks import key_of
from tridock.ops.runs.this_machine import node_environment
from tridock.sink_settings import Tracker
from tridock.strict_yaml import validated


def track(folders: Sequence[Path], names: Sequence[str], options: Mapping[str, object]) -> int:
    """Sends each run to each tracker; returns 0, or 4 if something could not be sent.

    ``options`` are fields of a tracker that override the experiment's. Raises :class:`RequestError` with every problem
    of the folders and the settings, and :class:`ClusterError` if a library is missing.
    """
    problems: list[Problem] = []
    wanted: list[tuple[Path, Tracker]] = []
    for folder in folders:
        try:
            wanted += [(folder, tracker) for tracker in _trackers(folder, names, options)]
        except TridockError as error:
            problems += error.problems
    if problems:
        raise RequestError(problems)
    pythons = {tracker.name: find_python(EXTRAS[tracker.name][0]) for _, tracker in wanted}
    missing = [name for name, python in pythons.items() if python is None]
    if missing:
        todo = "pip install 'tridock[trackers]', or make trackers in a checkout"
        raise ClusterError(Problem(EXTRAS[name][0], "is not installed", "", todo) for name in missing)
    failed = False
    for folder, tracker in wanted:
        env = node_environment(1)
        if (key := key_of("--tracker", tracker)) is not None:
            env[CREDENTIALS[tracker.name][0]] = key
        argv = [str(pythons[tracker.name]), "-P", "-m", "tridock.sinks", tracker.name, str(folder)]
        failed |= subprocess.run([*argv, encode(tracker.contract)], env=env, check=False).returncode != 0
    return 4 if failed else 0


def _trackers(folder: Path, names: Sequence[str], options: Mapping[str, object]) -> list[Tracker]:
    own: dict[str, Tracker] = {}
    if not (folder / run_folder.LOG_ARGUMENTS).is_file():
        check_run(folder)
        path = folder / run_folder.EXPERIMENT
        experiment = load_command(path) if is_command(path) else load_experiment(path)
        own = {tracker.name: tracker for tracker in experiment.trackers}
    if not (chosen := names or list(own)):
        todo = "name one: --tracker wandb, mlflow or tensorboard"
        raise RequestError(Problem(str(folder), "its experiment has no trackers", "", todo))
    place = options.get("address")
    if place is not None and "://" not in str(place):
        options = {**options, "address": os.path.abspath(str(place))}  # noqa: PTH100 - a folder that may not exist
    found = []
    for name in chosen:
        given = own[name].model_dump() if name in own else {"name": name}
        found.append(validated(Tracker, {**given, **options}, f"--tracker {name}"))
    return found
