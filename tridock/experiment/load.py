"""YAML to :class:`Experiment`: every problem at once, each with its field path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tridock.errors import RequestError
from tridock.experiment.schema import Experiment
from tridock.strict_yaml import dump_yaml, parse_yaml, problems_of, read_text


def load_experiment(path: Path) -> Experiment:
    """Reads an experiment file.

    Raises :class:`RequestError` with every problem found: a missing file, broken YAML, keys given twice,
    unknown or missing fields, wrong types, values out of range.
    """
    return parse_experiment(read_text(path, "an experiment"), source=str(path))


def parse_experiment(text: str, source: str) -> Experiment:
    """The same from text; ``source`` is the name that messages begin with."""
    fields: Mapping[str, Any] = parse_yaml(text, source)
    try:
        return Experiment.model_validate(fields)
    except ValidationError as error:
        raise RequestError(problems_of(error, source, Experiment)) from None


def dump_experiment(experiment: Experiment) -> str:
    """YAML with every field, defaults included: what a run's folder keeps."""
    return dump_yaml(experiment.model_dump(mode="json"))
