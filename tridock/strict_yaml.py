"""YAML into pydantic models, strictly: shared by every loader.

PyYAML silently keeps the last of two equal keys and reads ``1e-4`` as text: both have cost people runs.
"""

import difflib
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError

from tridock.errors import Problem, RequestError
from tridock.project_files import project_file

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvValue = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]*$")]
AS_TUPLE: Final = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""For a field that is a tuple: YAML has lists only, and strict mode does not convert one."""


class Section(BaseModel):
    """A mapping of a YAML file: unknown keys are errors, nothing is coerced, nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys and reads 1e-4 as the number it is in YAML 1.2."""


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class _DuplicateKeyError(Exception):
    def __init__(self, key: object, line: int) -> None:
        super().__init__(str(key))
        self.key, self.line = key, line


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            continue
        if key in seen:
            raise _DuplicateKeyError(key, key_node.start_mark.line + 1)
        seen.add(key)
    loader.flatten_mapping(node)
    return {loader.construct_object(k, deep=True): loader.construct_object(v, deep=True) for k, v in node.value}


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def read_text(path: Path, kind: str) -> str:
    """Reads a UTF-8 file that the user named, or else Tridock's own of this name.

    ``kind`` is what it should hold ("an experiment").
    """
    try:
        return project_file(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        got, todo = "no such file", f"give the path of {kind} file"
    except IsADirectoryError:
        got, todo = "a folder", f"give the path of {kind} file"
    except UnicodeDecodeError as error:
        got, todo = f"byte 0x{error.object[error.start]:02x} at offset {error.start}", "save it as UTF-8"
    except OSError as error:
        got, todo = error.strerror or str(error), "make it readable"
    raise RequestError(Problem(str(path), f"cannot be read as {kind}", got, todo))


def parse_yaml(text: str, source: str) -> Mapping[str, Any]:
    """Parses one YAML mapping; an empty document is an empty mapping."""
    loaded = parse_value(text, source)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise RequestError(
            Problem(source, "must be a mapping of fields", type(loaded).__name__, "write `field: value` lines")
        )
    return loaded


def parse_value(text: str, source: str) -> Any:
    """Parses one YAML value of any kind."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except _DuplicateKeyError as error:
        raise RequestError(
            Problem(f"{source}:{error.line}", "the key stands twice", repr(error.key), "keep one of the two")
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else source
        got = getattr(error, "problem", None) or str(error)
        raise RequestError(Problem(where, "is not valid YAML", got, "mend the syntax at this place")) from None


def dump_yaml(fields: Mapping[str, Any]) -> str:
    """Block-style YAML in the order given; reads back as the same values."""
    return yaml.safe_dump(dict(fields), sort_keys=False, default_flow_style=False, allow_unicode=True)


def validated(model: type[Model], fields: Mapping[str, Any], source: str) -> Model:
    """The fields as a model. Raises :class:`RequestError` with every problem, in the order of the file's fields."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestError([_problem_of(details, source, model) for details in found]) from None


def _problem_of(details: Any, source: str, model: type[BaseModel]) -> Problem:
    location = [str(part) for part in details["loc"] if part != "[key]"]
    where = f"{source}: {'.'.join(location)}" if location else source
    kind, context = details["type"], details.get("ctx", {})
    got = _short(details["input"])
    if kind == "missing":
        return Problem(where, "is missing", "", "add it")
    if kind == "extra_forbidden":
        return Problem(where, "is not a field", got, _known_fields(model, location))
    what, todo = _explained(kind, context, details["msg"])
    return Problem(where, what, got, todo)


_TYPES: Mapping[str, tuple[str, str]] = {
    "int_type": ("must be a whole number", "write it without quotes or a fraction"),
    "int_from_float": ("must be a whole number", "write it without a fraction"),
    "float_type": ("must be a number", "write it without quotes"),
    "bool_type": ("must be true or false", "write true or false, without quotes"),
    "string_type": ("must be text", "put it in quotes"),
    "dict_type": ("must be a mapping", "write `name: value` lines below it"),
    "list_type": ("must be a list", "write `- value` lines below it"),
    "tuple_type": ("must be a list", "write `- value` lines below it"),
    "model_type": ("must be a section of fields", "write `field: value` lines below it"),
    "finite_number": ("must be a finite number", "write an ordinary number"),
}


def _explained(kind: str, context: Mapping[str, Any], message: str) -> tuple[str, str]:
    if kind in _TYPES:
        return _TYPES[kind]
    match kind:
        case "greater_than":
            return f"must be greater than {context['gt']:g}", "raise it"
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}", "raise it"
        case "less_than":
            return f"must be less than {context['lt']:g}", "lower it"
        case "less_than_equal":
            return f"must be at most {context['le']:g}", "lower it"
        case "literal_error":
            return "is not one of the choices", f"use {context['expected']}"
        case "string_pattern_mismatch":
            return "has the wrong form", f"write text that matches {context['pattern']}"
        case "string_too_short":
            return "must not be empty", "give a value"
        case "value_error":
            return str(context["error"]), "mend it"
        case _:
            return message[:1].lower() + message[1:], "mend it"


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _known_fields(model: type[BaseModel], location: list[str]) -> str:
    section = _model_at(model, location[:-1])
    if section is None:
        return "remove it"
    names = list(section.model_fields)
    near = difflib.get_close_matches(location[-1], names, n=1)
    return f"did you mean {near[0]}?" if near else f"remove it, or use one of {', '.join(names)}"


def _model_at(annotation: Any, path: list[str]) -> type[BaseModel] | None:
    """The model that validates ``path``, which leads through fields, keys of mappings and indices of lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not path:
            return annotation
        field = annotation.model_fields.get(path[0])
        return None if field is None else _model_at(field.annotation, path[1:])
    # An optional adds no step to the path; a mapping's key and a list's index do.
    rest = path if typing.get_origin(annotation) in _SAME_PLACE else path[1:]
    found = (_model_at(argument, rest) for argument in typing.get_args(annotation))
    return next((inner for inner in found if inner is not None), None)


_SAME_PLACE = (typing.Union, types.UnionType, typing.Annotated)
