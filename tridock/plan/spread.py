"""How far runs lie from their plans, by class: measured over planned values of published runs, each planned as a user
would, with the model, the GPU and the nodes alone. ``make bench-planner`` writes ``spreads.yaml``. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

from tridock.errors import count
from tridock.experiment import Experiment
from tridock.gpus import GPUS, Gpu
from tridock.strict_yaml import read_text
from tridock.yaml_text import parse_yaml

PATH: Final = Path(__file__).with_name("spreads.yaml")
MANY: Final = 128
"""GPUs beyond which runs are another class."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Measured over planned values of a class, each of its sources weighted equally."""

    runs: int
    sources: int
    low: float
    typical: float
    """The median, by which estimates of time are multiplied."""
    high: float

    def __str__(self) -> str:
        times = f"{self.low:.2f} to {self.high:.2f} times the known terms, typically {self.typical:.2f}"
        return f"{times}: {self.runs:,} runs like this, of {count(self.sources, 'publication')}"

    def scaled(self, typical: float) -> Self:
        """Returns it around another median."""
        return replace(self, low=self.low * typical, typical=typical, high=self.high * typical)


@dataclass(frozen=True, slots=True)
class RunClass:
    """What an estimate's error depends on."""

    engine: str
    experts: bool
    many: bool
    """More than :data:`MANY` GPUs; of models with experts there are too few runs to tell."""
    measured: bool
    """Whether published runs used the GPU's kernels, or ``tridock calibrate`` measured them."""
    described: bool = False
    """Whether the experiment names another program; only on GPUs that are ``measured``."""

    @classmethod
    def of(cls, experiment: Experiment, ranks: int, gpu: Gpu | None, *, calibrated: bool = False) -> Self:
        experts = experiment.model.num_moe_experts is not None
        known = gpu is not None and any(gpu.kernels == GPUS[name].kernels for name in _document()["gpus"])
        described = experiment.program is not None
        return cls(
            experiment.engine, experts, ranks > MANY and not experts, known or calibrated or described, described
        )


@cache
def _document() -> Any:
    return parse_yaml(read_text(PATH, "the errors of plans"), str(PATH))


@cache
def time_spreads() -> Mapping[RunClass, Spread]:
    return {
        RunClass(**{name: one.pop(name) for name in RunClass.__slots__ if name in one}): Spread(**one)
        for one in map(dict, _document()["times"])
    }


def corrected_spread() -> Spread:
    """Returns that of plans that another run of the same table corrects."""
    return Spread(**_document()["corrected"])


def memory_spread(*, described: bool) -> Spread:
    """Returns that of memory against the plan's upper end, with or without a ``described`` program. Runs of all engines
    are one class: too few published any."""
    return Spread(**_document()["memory described" if described else "memory"])
