"""Loads YAML as :class:`Experiment`; reports every problem at once, each with its field path."""

import shlex
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tridock.errors import Problem, RequestError
from tridock.experiment.command import ENGINE, CommandExperiment
from tridock.experiment.schema import Experiment
from tridock.strict_yaml import read_text, validated
from tridock.yaml_text import DEEPEST, dump_yaml, parse_value, parse_yaml, shown


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment file. Each override is ``field.path=value``; the value is parsed as YAML.

    Raises :class:`RequestError` with every problem: a missing file, broken YAML, duplicate keys, unknown or missing
    fields, wrong types, values out of range.
    """
    return parse_experiment(read_text(path, "an experiment"), str(path), overrides)


def parse_experiment(text: str, source: str, overrides: Sequence[str] = ()) -> Experiment:
    """Parses an experiment as :func:`load_experiment` does; messages begin with ``source``."""
    fields = dict(parse_yaml(text, source))
    for override in overrides:
        _override(fields, override)
    if fields.get("engine") == ENGINE:
        todo = f"start it with tridock run --config {shlex.quote(source)}; tridock logs has the output of its runs"
        raise RequestError(Problem(f"{source}: engine", "is your own program, without a model", ENGINE, todo))
    if isinstance(file := fields.get("deepspeed"), str):
        fields["deepspeed"] = parse_yaml(read_text(Path(file), "a DeepSpeed JSON"), file)
    return validated(Experiment, fields, source)


def is_command(path: Path) -> bool:
    """Whether the file has ``engine: command``: the user's own program."""
    return parse_yaml(read_text(path, "an experiment"), str(path)).get("engine") == ENGINE


def load_command(path: Path, overrides: Sequence[str] = ()) -> CommandExperiment:
    """Reads an experiment with ``engine: command``. Raises :class:`RequestError` with every problem found."""
    fields = dict(parse_yaml(read_text(path, "an experiment"), str(path)))
    for override in overrides:
        _override(fields, override)
    return validated(CommandExperiment, fields, str(path))


def _override(fields: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    names = path.split(".")
    if not equals or not all(names) or len(names) > DEEPEST:
        what, todo = "must be a field's path, =, and a value", "write for example train.seed=7"
        raise RequestError(Problem("--set", what, shown(override), todo))
    section = fields
    for name in names[:-1]:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[names[-1]] = parse_value(text, f"--set {path}")


def fields_digest() -> str:
    """Returns a digest of the experiment's field names: the code that writes a run's ``experiment.yaml`` and the code
    that reads it must agree on it."""
    return sha256("\n".join(sorted(_field_names(Experiment))).encode()).hexdigest()[:16]


def _field_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _field_names(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def dump_experiment(experiment: Experiment | CommandExperiment) -> str:
    """Returns YAML with every field, including defaults, as the run folder stores it."""
    return dump_yaml(experiment.model_dump(mode="json"))
