"""Reads the points of a run from ``metrics.jsonl`` as it grows."""

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tridock.contracts.events import samples_of

TRAIN: Final = "train"
ITERATION: Final = "iteration"
EVALUATIONS: Final = ("valid", "test")
SAMPLES: Final = "samples"


@dataclass(frozen=True, slots=True)
class Point:
    """The values of a series at an iteration: ``train`` for logged iterations, ``valid`` and ``test`` for evaluations.

    ``values`` are keyed by tracker names: ``loss``, ``phases/forward``, ``valid/loss``.
    """

    series: str
    iteration: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Samples:
    """The model's completions at an iteration: the prompt and text of each."""

    iteration: int
    rows: Sequence[tuple[str, str]]


def series_of(name: str) -> str:
    first, slash, _ = name.partition("/")
    return first if slash and first in (*EVALUATIONS, SAMPLES) else TRAIN


def axis_of(series: str) -> str:
    """Returns the name of a series' iteration axis at a tracker."""
    return ITERATION if series == TRAIN else f"{series}/{ITERATION}"


def point_of(record: Mapping[str, Any]) -> Point | None:
    """Returns the point of a ``metrics.jsonl`` record; None for a record without an iteration."""
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
    """Yields the points after ``sent`` (the highest iteration of each series) and updates it.

    Iterations that a restarted run repeats are skipped: a tracker keeps the first record.
    """
    for point in filter(None, map(point_of, records)):
        if point.iteration > sent.get(point.series, -1):
            sent[point.series] = point.iteration
            yield point


def unsent_samples(events: Iterable[Mapping[str, Any]], sent: MutableMapping[str, int]) -> Iterator[Samples]:
    for event in events:
        for iteration, rows in samples_of((event,)).items():
            if iteration > sent.get(SAMPLES, -1):
                sent[SAMPLES] = iteration
                yield Samples(iteration, rows)
