"""Typed data as JSON: encodes dataclasses of plain values, and decodes them by their annotations."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tridock.contracts.forms import Form

T = TypeVar("T")

JSON_VERSION: Final = 1
"""Of the form of what ``--json`` prints: it rises when a field goes, or means another thing."""


class SchemaMismatchError(ValueError):
    """JSON that does not match the type, usually written by another version of Tridock."""


class FormError(ValueError):
    """A text that another machine or a folder may not have where it stands: no run id, a path that leads elsewhere."""


def encode(data: object) -> str:
    """Encodes a dataclass, or lists and dicts of them, as one line of JSON."""
    return json.dumps(data, default=asdict)


def as_json(document: Mapping[str, Any]) -> str:
    """Formats each element of a list (ranks, layouts, runs) on one line, in a third of the time of indented JSON.

    Raises :class:`ValueError` for NaN and infinities, which JSON has not.
    """
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {_value(value)}" for name, value in document.items()) + "\n}"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return "[\n" + ",\n".join(f"    {json.dumps(one, allow_nan=False)}" for one in value) + "\n  ]"
    return json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")


def decode(kind: type[T], text: str | bytes) -> T:
    """Decodes a value of type ``kind`` that :func:`encode` wrote. Raises :class:`ValueError` for anything else:
    :class:`FormError` for a text of the wrong form, usually :class:`SchemaMismatchError`."""
    try:
        decoded: T = _decoder(cast(Any, kind))(json.loads(text))
    except (AttributeError, KeyError, TypeError) as error:
        raise SchemaMismatchError(f"not of type {getattr(kind, '__name__', kind)}: {error}") from None
    return decoded


def schema_digest(kind: type) -> str:
    """Returns a digest of the type's fields, nested ones included. Equal digests mean that writer and reader agree."""
    return sha256("\n".join(sorted(_form(kind, ""))).encode()).hexdigest()[:16]


def _form(kind: Any, path: str) -> Iterator[str]:
    if is_dataclass(kind):
        for name, hint in get_type_hints(kind).items():
            yield from _form(hint, f"{path}.{name}")
        return
    yield f"{path} {getattr(kind, '__name__', kind)}"
    for number, argument in enumerate(get_args(kind)):
        yield from _form(argument, f"{path}[{number}]")


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Returns the function that decodes a JSON value to the type. Cached: the supervisor decodes every second."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return lambda value: _of_form(arguments[1], _plain(arguments[0], value))
    if origin in (UnionType, Union):
        several = [it for it in arguments if it is not NoneType]
        own = _decoder(several[0]) if len(several) == 1 else _decoder(object)
        return lambda value: None if value is None else own(value)
    if origin is tuple:
        item = _decoder(arguments[0])
        return lambda value: tuple(map(item, value))
    if origin in (dict, Mapping):
        key, item = arguments[0] if arguments[0] is int else _decoder(arguments[0]), _decoder(arguments[1])
        return lambda value: {key(name): item(it) for name, it in value.items()}
    if is_dataclass(kind):
        make: Any = kind
        decoders = {name: _decoder(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
        required = {it.name for it in fields(make) if it.default is MISSING and it.default_factory is MISSING}

        def read(value: Any) -> Any:
            if unknown := value.keys() - decoders.keys():
                raise TypeError(f"{make.__name__} has no {', '.join(sorted(unknown))} here")
            if missing := required - value.keys():
                raise TypeError(f"{make.__name__} lacks {', '.join(sorted(missing))}")
            return make(**{name: decoders[name](it) for name, it in value.items()})

        return read
    return lambda value: _plain(kind, value)


def _of_form(form: Form, value: str) -> str:
    if not form.holds(value):
        raise FormError(f"{value!r} is no {form.name}")
    return value


def _plain(kind: Any, value: Any) -> Any:
    if kind in (Any, object) or isinstance(value, kind):
        return value
    if issubclass(kind, StrEnum) or (kind is float and type(value) is int):
        return kind(value)
    raise TypeError(f"{value!r} is no {kind.__name__}")
