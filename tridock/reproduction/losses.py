"""Compares the losses of two runs, iteration by iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tridock.contracts.records import Evaluations, Record

Metrics = tuple[list[Record], Evaluations]
"""The result of :func:`tridock.contracts.records.read_metrics`."""
Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Point:
    """A loss of both runs. None is a loss that is not finite, or without ``there`` one that the new run lacks."""

    iteration: int
    split: str
    """``train``, ``valid`` or ``test``."""
    then: float | None
    now: float | None
    there: bool = True


@dataclass(frozen=True, slots=True)
class LossComparison:
    """The comparison of every loss that the original run logged."""

    compared: int
    """Losses of the original run."""
    differing: int
    """Those outside the tolerance, or not logged by the new run."""
    first: Point | None
    """The first different loss."""
    largest: float
    """The largest difference of two finite losses."""
    largest_at: int | None
    more: int
    """Losses that only the new run has: the original ended earlier."""


def compare_losses(then: Metrics, now: Metrics, tolerance: float) -> LossComparison:
    """Compares training, validation and test losses.

    Two losses agree if they differ by at most ``tolerance`` times max(1, abs(original)); with a tolerance of 0, if they
    are bitwise equal. Losses that are not finite agree with each other.
    """
    old, new = dict(_losses(then)), dict(_losses(now))
    points = [Point(*key, loss, new.get(key), key in new) for key, loss in sorted(old.items())]
    wrong = [point for point in points if not _agree(point, tolerance)]
    apart = {point: abs(point.then - point.now) for point in points if point.then is not None and point.now is not None}
    worst = max(apart, key=apart.__getitem__, default=None)
    return LossComparison(
        compared=len(points),
        differing=len(wrong),
        first=wrong[0] if wrong else None,
        largest=0.0 if worst is None else apart[worst],
        largest_at=worst.iteration if worst is not None and apart[worst] > 0 else None,
        more=len(new.keys() - old.keys()),
    )


def _agree(point: Point, tolerance: float) -> bool:
    if not point.there:
        return False
    if point.then is None or point.now is None:
        return point.then is point.now
    return abs(point.then - point.now) <= tolerance * max(1.0, abs(point.then))


def _losses(metrics: Metrics) -> Iterator[tuple[Key, float | None]]:
    iterations, evaluations = metrics
    for split, records in _by_split(iterations, evaluations).items():
        for record in records:
            loss = record.get("loss")
            number = float(loss) if isinstance(loss, int | float) else math.nan
            yield (record["iteration"], split), number if math.isfinite(number) else None


def _by_split(iterations: list[Record], evaluations: Evaluations) -> Mapping[str, list[Record]]:
    return {"train": iterations, **evaluations}
