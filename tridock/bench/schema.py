"""The YAML of a benchmark: an experiment, and what is varied of it. Typed, no I/O but its loader."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from tridock.strict_yaml import AS_TUPLE, Section, parse_yaml, read_text, validated

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,40}$")]
Fields = dict[str, Any]
"""Fields of the experiment by their paths, as ``--set`` takes them."""
Positive = Annotated[int, Field(gt=0)]


class Bench(Section):
    """What is measured."""

    experiment: Annotated[str, Field(min_length=1)] = Field(
        description="The experiment's YAML file, beside this one or from the current folder."
    )
    set: Fields = Field(default_factory=dict, description="Fields of the experiment that every cell changes.")
    axes: dict[Label, dict[Label, Fields]] = Field(
        default_factory=dict, description="What is varied: axis, its values by their labels, and the fields of each."
    )
    world: Annotated[tuple[Positive, ...], AS_TUPLE] = Field(
        default=(1,), description="Numbers of ranks on this machine; one more axis."
    )
    iterations: Positive = Field(default=20, description="Steps that are measured, in each run.")
    warmup: Positive = Field(default=5, description="Steps before those, which pay for the start.")
    repeats: Positive = Field(default=3, description="Runs of each cell; their medians count.")
    profiled: Annotated[int, Field(ge=0)] = Field(
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
    """Reads it, with other numbers of ranks where ``world`` is given; every problem in one :class:`RequestError`."""
    fields = dict(parse_yaml(read_text(path, "a benchmark"), str(path)))
    if world is not None:
        fields["world"] = list(world)
    return validated(Bench, fields, str(path))


def overrides_of(fields: Mapping[str, Any]) -> list[str]:
    """As ``--set`` takes them."""
    return [f"{name}={_yaml_text(value)}" for name, value in fields.items()]


def _yaml_text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
