"""The YAML of a benchmark, the cells of its matrix, and their measurements. No I/O except the loader."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints

from tridock.contracts.limits import MOST_RANKS
from tridock.errors import RequestError, RunError
from tridock.strict_yaml import AS_TUPLE, Count, PathText, Positive, Section, read_text, validated
from tridock.yaml_text import parse_yaml

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,40}$")]
Fields = dict[str, Any]
"""Experiment fields by their paths, as ``--set`` takes them."""


class Bench(Section):
    """What is measured."""

    experiment: PathText = Field(description="The experiment's YAML file, beside this one or from the current folder.")
    set: Fields = Field(default_factory=dict, description="Fields of the experiment that every cell changes.")
    axes: dict[Label, dict[Label, Fields]] = Field(
        default_factory=dict, description="What is varied: axis, its values by their labels, and the fields of each."
    )
    world: Annotated[tuple[Annotated[Positive, Field(le=MOST_RANKS)], ...], AS_TUPLE] = Field(
        default=(1,), description="Numbers of ranks on this machine; one more axis."
    )
    iterations: Positive = Field(default=20, description="Steps that are measured, in each run.")
    warmup: Positive = Field(default=5, description="Steps before those, which pay for the start.")
    repeats: Positive = Field(default=3, description="Runs of each cell; their medians count.")
    profiled: Count = Field(
        default=5,
        description="Steps under torch's profiler, in a run of their own after the measured ones, for the share of"
        " communication; 0 for none.",
    )
    timeout: Positive = Field(default=1800, description="Seconds until a run is given up.")
    bare: bool = Field(
        default=True,
        description="Also measure against a bare loop of PyTorch on the same model, for engine torch with ddp: in"
        " as many runs again, in which the two take turns.",
    )


def load_bench(path: Path, world: Sequence[int] | None = None) -> Bench:
    """Reads a benchmark; ``world`` overrides the numbers of ranks. All problems are in one :class:`RequestError`."""
    fields = dict(parse_yaml(read_text(path, "a benchmark"), str(path)))
    if world is not None:
        fields["world"] = list(world)
    return validated(Bench, fields, str(path))


_FEW: Final = 5
"""Minimum number of turns for a meaningful spread."""


@dataclass(frozen=True, slots=True)
class Cell:
    labels: Mapping[str, str]
    """The value's label on each axis."""
    world: int
    fields: Mapping[str, Any]
    """Fields that differ from the experiment."""

    @property
    def name(self) -> str:
        """The display name: ``fsdp · gpt-small · 2 ranks``."""
        return " · ".join([*self.labels.values(), f"{self.world} rank{'s' * (self.world > 1)}"])


def cells_of(bench: Bench) -> Iterator[Cell]:
    """Yields the product of the axes' values; the number of ranks changes fastest."""
    axes = [[(axis, label, fields) for label, fields in values.items()] for axis, values in bench.axes.items()]
    for values in itertools.product(*axes):
        fields = dict(bench.set)
        for _, _, own in values:
            fields.update(own)
        for world in bench.world:
            yield Cell({axis: label for axis, label, _ in values}, world, fields)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a cell. Times in seconds, memory in bytes; None if unknown."""

    cell: Cell
    state: str
    """ok, refused (by the planner) or failed."""
    reason: str = ""
    step_s: tuple[float, ...] = ()
    """The median step of each run."""
    tokens_per_step: int = 0
    unit: str = "tokens"
    """What a step processes: images, for an image model."""
    model_tflops_per_rank: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    device: str = ""
    over_bare: tuple[float, ...] = ()
    """For each turn of the engine and the bare loop: the engine's time over the bare loop's."""
    no_bare: str = ""
    """Why ``over_bare`` is unknown."""
    communication: float | None = None
    """Share of a step in which a rank communicates and computes nothing, the mean over the ranks."""
    no_communication: str = ""
    """Why ``communication`` is unknown."""
    runs: tuple[str, ...] = field(default=())
    profiled_run: str = ""
    """The run whose folder has the traces."""

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.step_s) if self.step_s else None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.median_s is None else self.tokens_per_step / self.median_s

    @property
    def spread(self) -> float | None:
        """The difference between the slowest and the fastest run, as a share of the median."""
        return None if self.median_s is None else (max(self.step_s) - min(self.step_s)) / self.median_s

    @property
    def overhead(self) -> float | None:
        """The engine's step time minus the bare loop's, as a share of the latter: the median of the turns."""
        return statistics.median(self.over_bare) - 1.0 if self.over_bare else None

    @property
    def overhead_error(self) -> float | None:
        """The standard error of that median, assuming a normal distribution with the turns' quartiles."""
        if len(self.over_bare) < _FEW:
            return None
        first, _, third = statistics.quantiles(self.over_bare, n=4)
        deviation = (third - first) / (2 * statistics.NormalDist().inv_cdf(0.75))
        return math.sqrt(math.pi / 2 / len(self.over_bare)) * deviation


def exit_code_of(measured: Sequence[Measured]) -> int:
    """Returns 0 if any cell was measured; otherwise the exit code of a failed run, or of an impossible request."""
    states = {one.state for one in measured}
    if "ok" in states:
        return 0
    return RunError.exit_code if "failed" in states else RequestError.exit_code


def scaling(measured: Measured, others: Sequence[Measured]) -> float | None:
    """Returns tokens/s per rank relative to the smallest world with the same labels: 1 is perfect scaling."""
    same = [one for one in others if one.cell.labels == measured.cell.labels and one.tokens_per_second is not None]
    if not same or measured.tokens_per_second is None:
        return None
    least = min(same, key=lambda one: one.cell.world)
    if least.cell.world == measured.cell.world:
        return None
    assert least.tokens_per_second is not None
    return (measured.tokens_per_second / measured.cell.world) / (least.tokens_per_second / least.cell.world)
