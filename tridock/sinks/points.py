"""The points of a run, from ``metrics.jsonl`` as it grows."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts.events import samples_of

TRAIN: Final = "train"
ITERATION: Final = "iteration"
EVALUATIONS: Final = ("valid", "test")
SAMPLES: Final = "samples"


@dataclass(frozen=True, slots=True)
class Point:
    """What a series has at an iteration: ``train`` the logged iterations, ``valid`` and ``test`` the evaluations.

    ``values`` are by their names at a tracker: ``loss``, ``phases/forward``, ``valid/loss``.
    """

    series: str
    iteration: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Samples:
    """How the model continued the prompts at an iteration: prompt and text of each."""

    iteration: int
    rows: Sequence[tuple[str, str]]


class Lines:
    """The objects of a JSON lines file that are new since the last call.

    A run that resumes cuts its metrics off and writes them again as another file: it is then read from the start.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields them in order; a line that is still being written comes with a later call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record


def series_of(name: str) -> str:
    """The series of a value's name at a tracker."""
    first, slash, _ = name.partition("/")
    return first if slash and first in (*EVALUATIONS, SAMPLES) else TRAIN


def axis_of(series: str) -> str:
    """The name of a series' iteration at a tracker."""
    return ITERATION if series == TRAIN else f"{series}/{ITERATION}"


def point_of(record: Mapping[str, Any]) -> Point | None:
    """The point of a record of ``metrics.jsonl``; None for a record without an iteration."""
    iteration = record.get(ITERATION)
    if not isinstance(iteration, int):
        return None
    series = str(record.get("split", TRAIN))
    prefix = "" if series == TRAIN else f"{series}/"
    values = dict(_values(prefix, {name: value for name, value in record.items() if name not in (ITERATION, "split")}))
    if isinstance(peaks := record.get("memory_bytes"), list):
        known = [float(peak) for peak in peaks if isinstance(peak, int | float)]
        values |= {"memory/highest_rank_gib": max(known) / 2**30} if known else {}
    return Point(series, iteration, values)


def _values(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if value is None:  # JSON has no NaN
            yield f"{prefix}{name}", math.nan
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
        elif isinstance(value, dict):
            yield from _values(f"{prefix}{name}/", value)


def unsent(records: Iterable[Mapping[str, Any]], sent: MutableMapping[str, int]) -> Iterator[Point]:
    """The points beyond ``sent``, the highest iteration of each series, which it brings up to date.

    What a restarted run repeats has been sent: of an iteration the first record is a tracker's.
    """
    for point in filter(None, map(point_of, records)):
        if point.iteration > sent.get(point.series, -1):
            sent[point.series] = point.iteration
            yield point


def unsent_samples(events: Iterable[Mapping[str, Any]], sent: MutableMapping[str, int]) -> Iterator[Samples]:
    """The same of the samples among a run's events."""
    for event in events:
        for iteration, rows in samples_of((event,)).items():
            if iteration > sent.get(SAMPLES, -1):
                sent[SAMPLES] = iteration
                yield Samples(iteration, rows)
