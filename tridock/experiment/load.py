"""Loads YAML as :class:`Experiment`; reports every problem at once, each with its field path."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tridock.contracts.pretrained import CONFIG, HF, read_config
from tridock.contracts.run_folder import EXPERIMENT
from tridock.errors import Problem, RequestError
from tridock.experiment.command import ENGINE, CommandExperiment
from tridock.experiment.inputs import differences
from tridock.experiment.presets import how_trained, preset_fields, replaced_by
from tridock.experiment.schema import Experiment
from tridock.experiment.transformers_config import model_fields, trained_fields
from tridock.strict_yaml import read_text, validated
from tridock.yaml_text import DEEPEST, dump_yaml, parse_value, parse_yaml, shown

AnyExperiment = Experiment | CommandExperiment
"""What a run executes: an engine's training, or your own program."""


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment file. Each override is ``field.path=value``; the value is parsed as YAML.

    Raises :class:`RequestError` with every problem: a missing file, broken YAML, duplicate keys, unknown or missing
    fields, wrong types, values out of range.
    """
    return parse_experiment(read_text(path, "an experiment"), str(path), overrides)


def parse_experiment(text: str, source: str, overrides: Sequence[str] = ()) -> Experiment:
    """Parses an experiment as :func:`load_experiment` does; messages begin with ``source``."""
    fields = _fields(text, source, overrides)
    _read_deepspeed(fields)
    place = _take_folder(fields, source)
    if place is None:
        return validated(Experiment, fields, source)
    config, where = read_config(place), str(place / CONFIG)
    model = {**trained_fields(config, where), **preset_fields(fields.get("model") or {})}
    experiment = validated(Experiment, {**fields, "model": model}, source)
    found = differences(experiment.model, model_fields(config, where), f"the model in {place} has")
    RequestError.raise_for(replace(it, where=f"{source}: {it.where}") for it in found)
    return experiment


def _take_folder(fields: dict[str, Any], source: str) -> Path | None:
    """Returns the transformers folder whose model an experiment has: that of ``model.from``, which it removes, or that
    of ``train.load`` if the model lacks sizes."""
    model, train = fields.get("model"), fields.get("train")
    given = model if isinstance(model, dict) else {}
    where, place = f"{source}: model.from", given.get("from")
    if "from" in given:
        fields["model"] = {name: value for name, value in given.items() if name != "from"}
    else:
        where, place = f"{source}: train.load", train.get("load") if isinstance(train, dict) else None
        has_sizes = "preset" in given or given.keys() >= {"num_layers", "hidden_size", "num_attention_heads"}
        if has_sizes or not (model is None or isinstance(model, dict)) or not str(place).startswith(f"{HF}:"):
            return None
    format_, _, folder = str(place).partition(":")
    if format_ != HF or not folder:
        raise RequestError(Problem(where, "must be hf:FOLDER", shown(place), "name a transformers model folder"))
    if not (Path(folder) / CONFIG).is_file():
        what, todo = f"needs {CONFIG} of the model here", "copy it to this path, or write the sizes of the model"
        raise RequestError(Problem(where, what, f"no {folder}/{CONFIG}", todo))
    return Path(folder)


def _read_deepspeed(fields: dict[str, Any]) -> None:
    if isinstance(file := fields.get("deepspeed"), str):
        fields["deepspeed"] = parse_yaml(read_text(Path(file), "a DeepSpeed JSON"), file)


def recorded_experiment(folder: Path) -> Experiment:
    """Reads the experiment in a run's folder, as :func:`parse_recorded` does."""
    path = folder / EXPERIMENT
    return parse_recorded(read_text(path, "an experiment"), str(path))


def recorded_run(folder: Path) -> AnyExperiment:
    """Reads the experiment in a run's folder, which may be your own program."""
    path = folder / EXPERIMENT
    return load_command(path) if is_command(path) else recorded_experiment(folder)


def parse_recorded(text: str, source: str) -> Experiment:
    """Parses the experiment of a run, which may come from a host: unlike yours, it names no other file to read."""
    return validated(Experiment, _fields(text, source), source)


def _fields(text: str, source: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    fields = _overridden(parse_yaml(text, source), overrides)
    if fields.get("engine") == ENGINE:
        todo = f"start it with tridock run --config {shlex.quote(source)}; tridock logs has the output of its runs"
        raise RequestError(Problem(f"{source}: engine", "is your own program, without a model", ENGINE, todo))
    return fields


def is_command(path: Path) -> bool:
    """Whether the file has ``engine: command``: the user's own program."""
    return parse_yaml(read_text(path, "an experiment"), str(path)).get("engine") == ENGINE


def load_command(path: Path, overrides: Sequence[str] = ()) -> CommandExperiment:
    """Reads an experiment with ``engine: command``. Raises :class:`RequestError` with every problem found."""
    fields = _overridden(parse_yaml(read_text(path, "an experiment"), str(path)), overrides)
    return validated(CommandExperiment, fields, str(path))


def _overridden(file: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the file's fields, changed by the overrides in their order. A preset, or a folder that the model is from,
    replaces the file's model first.

    Raises :class:`RequestError` for an override below a value that has no fields."""
    changes = [_change(override) for override in overrides]
    fields = dict(file)
    for path, value in changes:
        if path in ("model.preset", "model.from") and isinstance(model := fields.get("model"), dict):
            fields["model"] = dict(replaced_by(value, model) if path == "model.preset" else how_trained(model))
    for path, value in changes:
        *names, last = path.split(".")
        if path.startswith("deepspeed."):
            _read_deepspeed(fields)
        section = fields
        for depth, name in enumerate(names, 1):
            inner = section.get(name)
            if inner is not None and not isinstance(inner, dict):
                at = ".".join(names[:depth])
                todo = f"set {at} as a whole"
                raise RequestError(Problem(f"--set {path}", f"{at} has no fields", shown(inner), todo))
            section[name] = section = {} if inner is None else inner
        section[last] = value
    return fields


def _change(override: str) -> tuple[str, Any]:
    path, equals, text = override.partition("=")
    names = path.split(".")
    if not equals or not all(names) or len(names) > DEEPEST:
        what, todo = "must be a field's path, =, and a value", "write for example train.seed=7"
        raise RequestError(Problem("--set", what, shown(override), todo))
    return path, parse_value(text, f"--set {path}")


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


def dump_experiment(experiment: AnyExperiment) -> str:
    """Returns YAML with every field, including defaults, as the run folder stores it."""
    return dump_yaml(experiment.model_dump(mode="json"))
