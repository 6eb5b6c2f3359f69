"""Typed data as JSON: encodes dataclasses of plain values, and decodes them by their annotations."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class SchemaMismatchError(ValueError):
    """JSON that does not match the type, usually written by another version of Tridock."""


def encode(data: object) -> str:
    """Encodes a dataclass, or lists and dicts of them, as one line of JSON."""
    return json.dumps(data, default=asdict)


def decode(kind: type[T], text: str | bytes) -> T:
    """Decodes a value of type ``kind`` that :func:`encode` wrote. Raises :class:`ValueError` for anything else,
    usually :class:`SchemaMismatchError`."""
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
    if origin is UnionType:
        several = [it for it in arguments if it is not NoneType]
        own = _decoder(several[0]) if len(several) == 1 else _decoder(object)
        return lambda value: None if value is None else own(value)
    if origin is tuple:
        item = _decoder(arguments[0])
        return lambda value: tuple(map(item, value))
    if origin in (dict, Mapping):
        key, item = arguments[0], _decoder(arguments[1])
        return lambda value: {key(name): item(it) for name, it in value.items()}
    if is_dataclass(kind):
        make: Any = kind
        decoders = {name: _decoder(hint) for name, hint in get_type_hints(kind).items()}
        required = {it.name for it in fields(make) if it.default is MISSING and it.default_factory is MISSING}

        def read(value: Any) -> Any:
            if unknown := value.keys() - decoders.keys():
                raise TypeError(f"{make.__name__} has no {', '.join(sorted(unknown))} here")
            if missing := required - value.keys():
                raise TypeError(f"{make.__name__} lacks {', '.join(sorted(missing))}")
            return make(**{name: decoders[name](it) for name, it in value.items()})

        return read
    return lambda value: _plain(kind, value)


def _plain(kind: Any, value: Any) -> Any:
    if kind in (Any, object) or isinstance(value, kind):
        return value
    if issubclass(kind, StrEnum) or (kind is float and type(value) is int):
        return kind(value)
    raise TypeError(f"{value!r} is no {kind.__name__}")
