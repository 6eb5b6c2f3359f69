"""The verdict on a repeated run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tridock.contracts import run_folder
from tridock.differences import Difference
from tridock.reproduction.losses import LossComparison, compare_losses
from tridock.reproduction.original import Original, read_original

Verdict = Literal["identical", "within tolerance", "different"]

CPU: Final = "cpu"
TOLERANCES: Final = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""For GPUs, where the order of sums varies; relative to max(1, abs(loss)). On CPUs it is 0."""


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
        """Returns the content of ``reproduction.json``."""
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
        """Writes ``reproduction.json`` to the folder of the new run."""
        run_folder.write_atomic(folder / run_folder.REPRODUCTION, self.to_json().encode())

    def to_json(self) -> str:
        return json.dumps(self.document(), indent=2) + "\n"


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
