"""Weights & Biases through its own library, online or offline."""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import wandb
from wandb.proto import wandb_internal_pb2

from tridock.contracts.trackers import Tracker, has_wandb_login
from tridock.trackers.points import EVALUATIONS, SAMPLES, TRAIN, Point, Samples, axis_of, series_of
from tridock.trackers.subject import Subject

_INIT_S: Final = 60.0
_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandbTracker:
    """A W&B run with the run's own id, so that a restarted process continues the same run."""

    name = "wandb"

    def __init__(self, settings: Tracker) -> None:
        self._settings, self.destination = settings, settings.destination
        self._run: Any = None

    def open(self, subject: Subject) -> Mapping[str, int] | None:
        offline = self._settings.offline or os.environ.get("WANDB_MODE") == "offline"
        own = self._settings.address
        # Keeps W&B's artifact copies in the run's folder, not in the home folder.
        os.environ.setdefault("WANDB_DATA_DIR", str(subject.folder.absolute() / "wandb"))
        options: dict[str, Any] = {} if own is None else {"base_url": own}
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # these would be of this process, not of the ranks
            x_disable_meta=True,
            init_timeout=_INIT_S,
            login_timeout=1,
            **options,
        )
        if not offline and not os.environ.get("WANDB_API_KEY") and not has_wandb_login():
            raise ValueError("no API key: export WANDB_API_KEY where you launch, or set offline: true")
        published = _highest(_rows(subject.folder)) if offline else None
        self._run = run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            id=subject.run_id,
            name=subject.run_id,
            dir=str(subject.folder),
            resume="allow",
            mode="offline" if offline else "online",
            config=dict(subject.config),
            settings=settings,
        )
        run.define_metric(axis_of(TRAIN))
        run.define_metric("*", step_metric=axis_of(TRAIN))
        for series in (*EVALUATIONS, SAMPLES):
            run.define_metric(f"{series}/*", step_metric=axis_of(series))
        return published if offline else _highest([dict(run.summary)]) or None

    def log(self, points: Sequence[Point]) -> None:
        assert self._run is not None
        for point in points:
            self._run.log({axis_of(point.series): point.iteration, **point.values})

    def show(self, samples: Samples) -> None:
        assert self._run is not None
        rows = [[samples.iteration, prompt, text] for prompt, text in samples.rows]
        table = wandb.Table(columns=["iteration", "prompt", "text"], data=rows)
        self._run.log({axis_of(SAMPLES): samples.iteration, f"{SAMPLES}/text": table})

    def finish(self, subject: Subject, documents: Iterable[Path]) -> None:
        assert self._run is not None
        artifact = wandb.Artifact(f"run-{subject.run_id}", type="run")
        for path in documents:
            artifact.add_file(str(path.absolute()), policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)
        self._run.summary.update({**subject.summary(), "state": str(subject.state())})
        run, self._run = self._run, None
        run.finish(exit_code=subject.exit_code())

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with suppress(Exception):  # the connection itself may have failed
                run.finish(exit_code=1)
        # The library's own process keeps the run of an init that failed, and refuses its id: the next open needs a new
        # process. One that has ended with an error would end this one.
        with suppress(Exception, SystemExit):
            wandb.teardown(exit_code=1)


def _highest(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the highest iteration of each series among the rows of a run's history."""
    found: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            series = series_of(name)
            if name == axis_of(series) and isinstance(value, int | float):
                found[series] = max(found.get(series, -1), int(value))
    return found


def _rows(place: Path) -> list[dict[str, Any]]:
    """Returns the history that all of W&B's processes have written below a folder.

    Points that a killed process had only in memory are in no file.
    """
    return [row for path in sorted(place.glob("wandb/*run-*/run-*.wandb")) for row in history(path)]


def history(path: Path) -> Iterator[dict[str, Any]]:
    for record in records(path):
        if record.HasField("history"):
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def records(path: Path) -> Iterator[Any]:
    """Yields W&B's records of one ``.wandb`` file, in LevelDB's log format; skips an incomplete end."""
    for data in _parts(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def _parts(content: bytes) -> Iterator[bytes]:
    """Yields record parts of LevelDB's log format: 32 KiB blocks; records of checksum, length, kind and data, split."""
    at, parts = _FILE_HEADER, b""
    while at + _HEADER <= len(content):
        if (rest := _BLOCK - at % _BLOCK) < _HEADER:
            at += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part = content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if len(part) < length or kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            return
        parts = part if kind in (_WHOLE, _FIRST) else parts + part
        if kind in (_WHOLE, _LAST):
            yield parts
