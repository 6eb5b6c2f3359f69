"""MLflow through its own client: a server or a file store."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from tridock.contracts.run_state import RunState
from tridock.contracts.trackers import Tracker
from tridock.differences import flattened
from tridock.trackers.points import EVALUATIONS, SAMPLES, TRAIN, Point, Samples, axis_of, series_of
from tridock.trackers.subject import Subject

TAG: Final = "tridock.run"
_AT_ONCE: Final = 900
_PARAMS_AT_ONCE: Final = 100
_LONGEST_PARAM: Final = 500
_ENDS: Final = {
    RunState.DONE: "FINISHED",
    RunState.STOPPED: "KILLED",
    RunState.PREEMPTED: "KILLED",
    RunState.FAILED: "FAILED",
    RunState.LOST: "FAILED",
}


class MlflowTracker:
    """An MLflow run found by a tag with the run's id, so that a restarted process continues the same run."""

    name = "mlflow"

    def __init__(self, settings: Tracker) -> None:
        self._settings, self.destination = settings, settings.destination
        self._client: Any = None
        self._run = ""
        self._known: set[tuple[str, int]] = set()

    def open(self, subject: Subject) -> Mapping[str, int] | None:
        self._client = client = MlflowClient(tracking_uri=address_of(self._settings, subject.folder))
        found = client.get_experiment_by_name(self._settings.project)
        experiment = client.create_experiment(self._settings.project) if found is None else found.experiment_id
        runs = client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{subject.run_id}'")
        if runs:
            self._run = runs[0].info.run_id
            client.set_terminated(self._run, "RUNNING")
        else:
            created = client.create_run(experiment, run_name=subject.run_id, tags={TAG: subject.run_id})
            self._run = created.info.run_id
        published = {series: max(steps) for series in (TRAIN, *EVALUATIONS) if (steps := self._steps(axis_of(series)))}
        if shown := [file.path for file in client.list_artifacts(self._run, SAMPLES)]:
            published[SAMPLES] = max(int(Path(path).stem) for path in shown)
        # An interrupted batch may contain part of an iteration's values: its axis comes last.
        names = client.get_run(self._run).data.metrics
        self._known = {
            (name, step) for name in names for step in self._steps(name) if step > published.get(series_of(name), -1)
        }
        self._describe(subject)
        return published

    def _steps(self, name: str) -> list[int]:
        return [metric.step for metric in self._client.get_metric_history(self._run, name)]

    def _describe(self, subject: Subject) -> None:
        """Logs the configuration as parameters, which are immutable; a run with a new layout keeps the first ones."""
        known = self._client.get_run(self._run).data.params
        params = [
            Param(_plain(name), value[:_LONGEST_PARAM])
            for name, value in flattened(subject.config)
            if _plain(name) not in known
        ]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=params[first : first + _PARAMS_AT_ONCE])

    def log(self, points: Sequence[Point]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(_plain(name), value, now, point.iteration)
            for point in points
            for name, value in (*point.values.items(), (axis_of(point.series), float(point.iteration)))
            if (_plain(name), point.iteration) not in self._known
        ]
        for first in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[first : first + _AT_ONCE])

    def show(self, samples: Samples) -> None:
        text = "".join(f"{prompt}{text}\n\n" for prompt, text in samples.rows)
        self._client.log_text(self._run, text, f"{SAMPLES}/{samples.iteration:08d}.txt")

    def finish(self, subject: Subject, documents: Iterable[Path]) -> None:
        for path in documents:
            self._client.log_artifact(self._run, str(path))
        tags = {**{name: f"{value:.4f}" for name, value in subject.summary().items()}, "state": str(subject.state())}
        self._client.log_batch(self._run, tags=[RunTag(f"tridock.{name}", value) for name, value in tags.items()])
        self._client.set_terminated(self._run, _ENDS.get(subject.state(), "RUNNING"))

    def close(self) -> None:
        self._client = None


def address_of(settings: Tracker, place: Path) -> str:
    """Returns the tracking URI: the address, the library's variable, or a file store in the run's folder."""
    address = None if settings.offline else settings.address or os.environ.get("MLFLOW_TRACKING_URI")
    if address is None:
        return (place.absolute() / "mlflow").as_uri()
    return address if ":" in address else Path(address).absolute().as_uri()


def _plain(name: str) -> str:
    """Returns the name with only the characters that MLflow accepts."""
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-. /") else "_" for sign in name)
