"""Compares the losses of a repeated run with the original, iteration by iteration: the verdict."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tridock.contracts import run_folder
from tridock.contracts.codec import JSON_VERSION, as_json
from tridock.differences import Difference
from tridock.reproduction.original import Metrics, Original, read_original

Verdict = Literal["identical", "within tolerance", "different"]

CPU: Final = "cpu"
TOLERANCES: Final = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""For GPUs, where the order of sums varies; relative to max(1, abs(loss)). On CPUs it is 0."""


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


def _losses(metrics: Metrics) -> Iterator[tuple[tuple[int, str], float | None]]:
    iterations, evaluations = metrics
    for split, records in {"train": iterations, **evaluations}.items():
        for record in records:
            loss = record.get("loss")
            number = float(loss) if isinstance(loss, int | float) else math.nan
            yield (record["iteration"], split), number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The comparison of the original run (``then``) with the repeated one (``now``)."""

    then: str
    now: str
    devices: tuple[str | None, str | None]
    tolerance: float
    environment: tuple[Difference, ...]
    losses: LossComparison
    moved: bool = False

    @property
    def verdict(self) -> Verdict:
        """``identical`` means bitwise equal, whatever the tolerance."""
        if self.losses.differing:
            return "different"
        return "within tolerance" if self.losses.largest else "identical"

    def document(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "then": self.then,
            "now": self.now,
            "devices": list(self.devices),
            "tolerance": self.tolerance,
            "environment": [{"field": it.field, "then": it.values[0], "now": it.values[1]} for it in self.environment],
            "losses": asdict(self.losses),
            "moved": self.moved,
        }

    def write(self, folder: Path) -> None:
        run_folder.write_atomic(folder / run_folder.REPRODUCTION, self.to_json().encode())

    def to_json(self) -> str:
        return as_json({"version": JSON_VERSION, **self.document()}) + "\n"


def judge(
    original: Original, folder: Path, differing: Sequence[Difference], precision: str, tolerance: float | None
) -> Outcome:
    """Compares the run in ``folder`` with the original. Raises :class:`RequestError` if it logged no losses.

    ``tolerance`` defaults to 0 if both ran on CPUs, otherwise to that of the precision.
    """
    again = read_original(folder)
    devices = original.device, again.device
    if tolerance is None:
        tolerance = 0.0 if all(device in (CPU, None) for device in devices) else TOLERANCES[precision]
    return Outcome(
        then=original.folder.absolute().name,
        now=folder.absolute().name,
        devices=devices,
        tolerance=tolerance,
        environment=tuple(differing),
        losses=compare_losses(original.metrics, again.metrics, tolerance),
        moved=original.moved,
    )
