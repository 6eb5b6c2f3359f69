"""Strict reading of users' files into pydantic models, shared by every loader."""

import difflib
import io
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError, PydanticKnownError

from tridock.errors import Problem, RequestError, cut, printable
from tridock.project_files import project_file
from tridock.yaml_text import shown

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvValue = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]*$")]
LARGEST: Final = 2**31 - 1
_LONGEST_PATH: Final = 4096
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
AS_TUPLE: Final = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""For a tuple field: YAML has only lists, and pydantic's strict mode does not convert them."""


def path_text(value: str) -> str:
    """Returns a path; raises ValueError for what can be none."""
    if not value:
        raise PydanticKnownError("string_too_short", {"min_length": 1})
    if len(value) > _LONGEST_PATH:
        raise PydanticKnownError("string_too_long", {"max_length": _LONGEST_PATH})
    if printable(value) != value or "\n" in value or "\t" in value:
        raise ValueError("must be a path without control characters")
    if not value.strip():
        raise ValueError("must be a path, not only spaces")
    return value


PathText = Annotated[str, AfterValidator(path_text)]


def whole(value: Any) -> Any:
    """Validates a field whose choices are integers: pydantic alone accepts true and 1.0 for 1."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("int_type", "no whole number")
    return value


def as_json(value: Any) -> Any:
    """Validates a field with any content that JSON can represent."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("must have finite numbers") from None
    return value


class Section(BaseModel):
    """A mapping in a YAML file: unknown keys are errors, values are not coerced, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


MOST_BYTES: Final = 512 * 1024


def read_text(path: Path, kind: str) -> str:
    """Reads the UTF-8 file that the user named, or Tridock's own file of this name; at most :data:`MOST_BYTES`.

    ``kind`` names the expected content ("an experiment").
    """
    try:
        with project_file(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) <= MOST_BYTES:
            # Normalizes line ends, as opening in text mode does.
            return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
        got, todo = f"more than {MOST_BYTES // 1024} KiB", f"give the path of {kind} file"
    except FileNotFoundError:
        got, todo = "no such file", f"give the path of {kind} file"
    except IsADirectoryError:
        got, todo = "a folder", f"give the path of {kind} file"
    except UnicodeDecodeError as error:
        got, todo = f"byte 0x{error.object[error.start]:02x} at offset {error.start}", "save it as UTF-8"
    except OSError as error:
        got, todo = error.strerror or str(error), "make it readable"
    except ValueError:  # a path with a NUL
        got, todo = "no path", f"give the path of {kind} file"
    raise RequestError(Problem(str(path), f"cannot be read as {kind}", got, todo))


def validated(model: type[Model], fields: Mapping[str, Any], source: str) -> Model:
    """Builds the model. Raises :class:`RequestError` with every problem, in the order of the file's fields."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestError([_problem_of(details, source, model) for details in found]) from None


def _problem_of(details: Any, source: str, model: type[BaseModel]) -> Problem:
    location = [str(part) for part in details["loc"] if part != "[key]"]
    where = f"{source}: {'.'.join(cut(part, 80) for part in location)}" if location else source
    kind, context = details["type"], details.get("ctx", {})
    value = details["input"]
    got = shown(value)
    if kind == "missing":
        return Problem(where, "is missing", "", "add it")
    if kind == "extra_forbidden":
        return Problem(where, "is not a field", got, _known_fields(model, location))
    what, todo = _explained(kind, context, details["msg"])
    if value is None:
        todo = "give a value, or leave the line out"
    elif kind in ("int_type", "int_from_float", "float_type"):
        todo = _as_a_number(value, kind) or todo
    return Problem(where, what, got, todo)


def _as_a_number(value: Any, kind: str) -> str | None:
    """Returns how to write this value of another type as a number; None where the remedy of its kind says it."""
    if kind == "float_type":
        return None if isinstance(value, str) and _is_number(value) else "write a number, as in 0.5"
    if isinstance(value, float):
        return f"write {value:.0f}" if value.is_integer() and abs(value) < _MOST_DIGITS else None
    return None if isinstance(value, str) and value.isdecimal() else "write only digits, as in 1000"


_MOST_DIGITS: Final = 1e15


def _is_number(text: str) -> bool:
    try:
        return "_" not in text and math.isfinite(float(text))
    except ValueError:
        return False


_TYPES: Mapping[str, tuple[str, str]] = {
    "invalid_key": ("is not a field's name", "remove it"),
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
            return f"must be greater than {as_number(context['gt'])}", "raise it"
        case "greater_than_equal":
            return f"must be at least {as_number(context['ge'])}", "raise it"
        case "less_than":
            return f"must be less than {as_number(context['lt'])}", "lower it"
        case "less_than_equal":
            return f"must be at most {as_number(context['le'])}", "lower it"
        case "literal_error":
            return "is not one of the choices", f"use {context['expected']}"
        case "string_pattern_mismatch":
            return "has the wrong form", f"write text that matches {context['pattern']}"
        case "string_too_long":
            return f"must have at most {context['max_length']:,} characters", "shorten it"
        case "string_too_short":
            return "must not be empty", "give a value"
        case "value_error":
            return str(context["error"]), "correct it"
        case _:
            return message[:1].lower() + message[1:], "correct it"


def as_number(bound: float) -> str:
    """Formats a bound with all its digits."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _known_fields(model: type[BaseModel], location: list[str]) -> str:
    section = _model_at(model, location[:-1])
    if section is None:
        return "remove it"
    names, below = list(section.model_fields), _fields_below(model)
    nearest = difflib.get_close_matches(location[-1].lower().replace("-", "_"), [*names, *below], n=1)
    near = [path for name in nearest for path in ([name] if name in names else below[name])]
    return f"did you mean {' or '.join(near)}?" if near else f"remove it, or use one of {', '.join(names)}"


def _fields_below(model: type[BaseModel]) -> dict[str, list[str]]:
    """Returns the paths of the fields in the model's sections, by their names."""
    found: dict[str, list[str]] = {}
    for name, field in model.model_fields.items():
        inner = _model_at(field.annotation, [])
        if inner is not None and typing.get_origin(field.annotation) in (None, *_SAME_PLACE):
            for last in inner.model_fields:
                found.setdefault(last, []).append(f"{name}.{last}")
    return found


def _model_at(annotation: Any, path: list[str]) -> type[BaseModel] | None:
    """Returns the model that validates ``path``, a path of fields, mapping keys and list indices."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not path:
            return annotation
        field = annotation.model_fields.get(path[0])
        return None if field is None else _model_at(field.annotation, path[1:])
    # Optional adds no step to the path; a mapping key or list index does.
    rest = path if typing.get_origin(annotation) in _SAME_PLACE else path[1:]
    found = (_model_at(argument, rest) for argument in typing.get_args(annotation))
    return next((inner for inner in found if inner is not None), None)


_SAME_PLACE = (typing.Union, types.UnionType, typing.Annotated)
