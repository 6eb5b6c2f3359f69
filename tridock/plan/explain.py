"""One field of an experiment or of a cluster's settings, explained."""

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from tridock.cluster.schema import Settings
from tridock.engines import ENGINES, engines_with
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.layout.split import either
from tridock.strict_yaml import AS_TUPLE, LARGEST, Section, as_number, read_text, validated
from tridock.yaml_text import parse_yaml

_WIDTH: Final = 110
_SCHEMAS: Final[dict[str, type[BaseModel]]] = {"experiment": Experiment, "cluster settings": Settings}
_ANY: Final = "NAME"
"""Placeholder in a path for a name that the user chooses, such as a node's."""
COMPLETE: Final = ("model.", "parallel.", "batch.", "precision")
"""Prefixes of the fields that affect, or seem to affect, memory or time."""
LETTERS: Final = (
    "s tokens of a sample, b samples of a micro-batch, h hidden size, a heads, V rows of the vocabulary; t, p, c, d"
    " tensor, pipeline, context and data parallel size; m micro-batches of a step"
)
"""The letters in ``effects.yaml``."""


class Effect(Section):
    """A field's rules, besides the engines that support it, and its effect on a rank's memory and time."""

    rules: Annotated[tuple[str, ...], AS_TUPLE] = ()
    memory: str = ""
    time: str = ""


@cache
def effects() -> Mapping[str, Effect]:
    """``effects.yaml``: effects by the path of their field."""
    path = Path(__file__).with_name("effects.yaml")
    found = parse_yaml(read_text(path, "the effects of fields"), str(path))
    return {field: validated(Effect, effect, f"{path}: {field}") for field, effect in found.items()}


@dataclass(frozen=True, slots=True)
class _Field:
    """A field, or a section with fields, in one of the schemas."""

    schema: str
    path: str
    field: FieldInfo
    section: type[BaseModel] | None


def explain(field_path: str) -> str:
    """Explains a field: description, type, default, its rules, its effect on memory and time.

    A section lists its fields in one line each; a name that both schemas have explains both. ``nodes.NAME.listen``,
    with any name, is a field of a node. Raises :class:`RequestError` for an unknown field, with the nearest names.
    """
    known = [place for schema, model in _SCHEMAS.items() for place in _places(schema, model, "")]
    found = [place for place in known if _matches(place.path, field_path)]
    if not found:
        paths = [place.path for place in known]
        near = difflib.get_close_matches(field_path, paths, n=1) or [
            path for path in paths if path.rpartition(".")[2] == field_path.rpartition(".")[2]
        ]
        todo = f"did you mean {near[0]}?" if near else "configs/reference.yaml and docs/cluster.md have all of them"
        raise RequestError(Problem("--explain", "is not a field", repr(field_path), todo, tuple(near[:1])))
    return "\n".join("\n".join(_lines(place, known)) + "\n" for place in found)


def _places(schema: str, model: type[BaseModel], prefix: str) -> Iterator[_Field]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        section, key = _section_of(field.annotation)
        yield _Field(schema, path, field, section)
        if section is not None:
            yield from _places(schema, section, f"{path}{key}.")


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Returns the section behind a field's type, and the path between the two: a mapping's key, or nothing."""
    values = get_args(annotation)[1:] if get_origin(annotation) is dict else (annotation,)
    for value in values:
        if isinstance(value, type) and issubclass(value, BaseModel):
            return value, f".{_ANY}" if get_origin(annotation) is dict else ""
    return None, ""


def _matches(path: str, given: str) -> bool:
    names, parts = path.split("."), given.split(".")
    return len(names) == len(parts) and all(
        name == part or (name == _ANY and part != "") for name, part in zip(names, parts, strict=True)
    )


def _lines(place: _Field, known: list[_Field]) -> Iterator[str]:
    yield f"{place.path} ({place.schema})"
    yield from _wrapped("  ", _meaning(place))
    if place.section is not None:
        below = f"{place.path}{_section_of(place.field.annotation)[1]}."
        inside = [other for other in known if other.schema == place.schema and other.path.startswith(below)]
        yield from _rows([(other.path.removeprefix(below), _meaning(other)) for other in inside])
        return
    rows = [("type", _type(place.field)), ("default", _default(place.field))]
    if place.schema == "experiment":
        effect = effects().get(place.path, Effect())
        rows += [("rule", rule) for rule in rules_of(place.path)]
        if place.path.startswith(COMPLETE):
            rows += [("memory", effect.memory or "nothing"), ("time", effect.time or "nothing"), ("where", LETTERS)]
    yield from _rows(rows)


def rules_of(path: str) -> tuple[str, ...]:
    """Returns an experiment field's rules: the engines that support it, then those of :func:`effects`."""
    names, rules = engines_with(path), effects().get(path, Effect()).rules
    return rules if len(names) == len(ENGINES) else (f"only with engine {either(names)}", *rules)


def _meaning(place: _Field) -> str:
    own = place.field.description
    return own or ((place.section.__doc__ or "").splitlines()[0] if place.section is not None else "")


def _rows(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield from _wrapped(f"  {name:{width}}  ", text)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _default(field: FieldInfo) -> str:
    """Returns the default as YAML."""
    if field.is_required():
        return "none: it must be given"
    value = field.get_default(call_default_factory=True)
    return value if isinstance(value, str) else json.dumps(value)


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return _type_text(TypeAdapter(annotation).json_schema())


_TYPES: Final = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
}
_BOUNDS: Final = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def _type_text(schema: Mapping[str, Any]) -> str:
    """Returns a type as plain text, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_type_text(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "const" in schema:
        return str(schema["const"])
    if "$ref" in schema:  # a nested section
        return "mapping of fields"
    if schema["type"] == "array":
        return f"list of {_type_text(schema['items'])}"
    if schema["type"] == "object":
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return "mapping" if values is True else f"mapping of names to {_type_text(values)}"
    given = {name: schema[name] for name in _BOUNDS if schema.get(name) not in (None, LARGEST)}
    bounds = [f"{_BOUNDS[name]} {as_number(bound)}" for name, bound in given.items()]
    pattern = f" that matches {schema['pattern']}" if "pattern" in schema else ""
    return _TYPES[schema["type"]] + (f", {' and '.join(bounds)}" if bounds else "") + pattern
