"""Reads and writes YAML 1.2 by its core schema, with size limits. PyYAML only scans and parses.

PyYAML's own values follow YAML 1.1: it reads ``010`` as 8, ``12:48`` as 768, ``no`` as false and ``1e-4`` as text,
keeps the last of two equal keys, and expands nested aliases without a limit. Each of these has spoiled runs.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import yaml
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.scanner import Scanner

from tridock.errors import Problem, RequestError, cut

MOST_VALUES: Final = 50_000
"""Maximum number of keys and values in a document, with aliases expanded."""
DEEPEST: Final = 64
_LARGEST: Final = 2**63 - 1

_TAG: Final = "tag:yaml.org,2002:"
_INTEGER: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL: Final = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL: Final = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_BASES: Final = {"0o": 8, "0x": 16}
_DIGITS: Final = 80
_MERGE: Final = "<<"


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
    """Parses one YAML value: text, int, float, bool, None, list or dict. No value is shared.

    Raises :class:`RequestError` with the position of invalid YAML, a duplicate key or an exceeded limit.
    """
    try:
        return _Document(text, source).read()
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = error.character if isinstance(error.character, int) else ord(error.character)
        problem = Problem(f"{source}:{line}", "is not valid YAML", f"character U+{character:04X}", "remove it")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else source
        got = getattr(error, "problem", None) or str(error)
        problem = Problem(where, "is not valid YAML", got, "correct the syntax here")
    raise RequestError(problem)


def dump_yaml(fields: Mapping[str, Any]) -> str:
    """Writes block-style YAML in the given order. :func:`parse_yaml` and YAML 1.1 parsers read the same values."""
    return yaml.dump(dict(fields), Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Also quotes text that YAML 1.2 would read as a number, and escapes line breaks other than a newline."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _text)

for _kind, _pattern in (("int", _INTEGER), ("float", _FLOAT)):
    _Dumper.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern.pattern})$"), list("-+.0123456789"))


class _Events(Reader, Scanner, Parser):
    """PyYAML's parser without its resolver and constructors."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)


class _Document:
    """One document while its values are read."""

    def __init__(self, text: str, source: str) -> None:
        self._events: Any = _Events(text)
        self._source = source
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._count, self._depth = 0, 0

    def read(self) -> Any:
        self._events.get_event()  # of the stream
        if self._events.check_event(yaml.StreamEndEvent):
            return None
        self._events.get_event()  # of the document
        value = self._value(self._events.get_event())
        self._events.get_event()
        if not self._events.check_event(yaml.StreamEndEvent):
            self._refuse(self._events.get_event(), "begins a second document", "---", "keep one")
        return value

    def _value(self, event: Any) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        before = self._count
        self._counted(event, 1)
        if event.anchor is not None:
            self._anchors.pop(event.anchor, None)
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        else:
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            if event.tag not in (None, "!", f"{_TAG}{'map' if is_mapping else 'seq'}"):
                self._refuse_tag(event)
            with self._below(event):
                value = self._mapping() if is_mapping else self._sequence()
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._count - before)
        return value

    def _alias(self, event: Any) -> Any:
        if event.anchor not in self._anchors:
            todo = "name an anchor that stands, complete, above it"
            self._refuse(event, "refers to no anchor", f"*{event.anchor}", todo)
        value, count = self._anchors[event.anchor]
        self._counted(event, count)
        return _copy(value)

    @contextmanager
    def _below(self, event: Any) -> Iterator[None]:
        self._depth += 1
        if self._depth > DEEPEST:
            self._refuse(event, f"is nested deeper than {DEEPEST} levels", "", "remove levels")
        yield
        self._depth -= 1

    def _counted(self, event: Any, number: int) -> None:
        self._count += number
        if self._count > MOST_VALUES:
            what = f"has more than {MOST_VALUES:,} values"
            self._refuse(event, f"{what}, those that aliases repeat included", "", "remove some")

    def _sequence(self) -> list[Any]:
        values = []
        while not isinstance(event := self._events.get_event(), yaml.SequenceEndEvent):
            values.append(self._value(event))
        return values

    def _mapping(self) -> dict[Any, Any]:
        own: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        while not isinstance(event := self._events.get_event(), yaml.MappingEndEvent):
            is_merge = isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == _MERGE
            if is_merge and not merged:
                merged = self._merged(self._events.peek_event())
                continue
            key = self._value(event)
            if isinstance(key, dict | list):
                got = "a mapping" if isinstance(key, dict) else "a list"
                self._refuse(event, "must be a plain value before the colon", got, "write `name: value`")
            if key in own or is_merge:
                where = f"{self._source}:{event.start_mark.line + 1}"
                raise RequestError(Problem(where, "the key stands twice", shown(key), "keep one of the two"))
            own[key] = self._value(self._events.get_event())
        return {**merged, **own} if merged else own

    def _merged(self, event: Any) -> dict[Any, Any]:
        """Returns the value of ``<<:``: one mapping, or several merged, where the first wins."""
        value = self._value(self._events.get_event())
        several = value if isinstance(value, list) else [value]
        if not several or not all(isinstance(one, dict) for one in several):
            todo = "name a mapping's anchor, as in `<<: *defaults`, or a list of them"
            self._refuse(event, "is no mapping, which << merges", shown(value), todo)
        return {key: one[key] for one in reversed(several) for key in one}

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if bad := re.search(r"[\x00\ud800-\udfff]", text):
            self._refuse(event, "has a character that no text can have", f"U+{ord(bad[0]):04X}", "remove it")
        plain, quoted = event.implicit
        if quoted or event.tag in ("!", f"{_TAG}str"):
            return text
        if plain:
            return self._core(event, text)
        value = self._core(event, text)
        kind = "null" if value is None else type(value).__name__
        if event.tag == f"{_TAG}float" and kind == "int":
            return float(value)
        if event.tag != _TAG + kind:
            self._refuse_tag(event)
        return value

    def _core(self, event: Any, text: str) -> Any:
        """Resolves a plain scalar by YAML 1.2's core schema."""
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INTEGER.fullmatch(text):
            # The digits are counted first: Python takes seconds for thousands of digits, and refuses more.
            number = int(text, _BASES.get(text[:2], 10)) if len(text) <= _DIGITS else None
            if number is None or abs(number) > _LARGEST:
                self._refuse(event, "is a number of more than 64 bits", cut(text, 40), "write a smaller one")
            return number
        if _FLOAT.fullmatch(text):
            return float(text)
        if special := _SPECIAL.fullmatch(text):
            return float(special[0].replace(".", "").lower())
        return text

    def _refuse_tag(self, event: Any) -> NoReturn:
        tag = event.tag.replace(_TAG, "!!")
        self._refuse(event, "has a tag that does not fit its value", cut(tag, 80), "leave the tag out")

    def _refuse(self, event: Any, what: str, got: str, todo: str) -> NoReturn:
        mark = event.start_mark
        raise RequestError(Problem(f"{self._source}:{mark.line + 1}:{mark.column + 1}", what, got, todo))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


class _Shown(reprlib.Repr):
    """A bounded excerpt of a value of any size, in YAML's notation."""

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802  reprlib finds it by the type's name
        return "null"

    def repr_bool(self, value: bool, _level: int) -> str:
        return str(value).lower()


_LONGEST: Final = 80
_SHOWN: Final = _Shown()
_SHOWN.maxlevel, _SHOWN.maxdict, _SHOWN.maxlist, _SHOWN.maxtuple, _SHOWN.maxstring = 4, 6, 10, 10, 80


def shown(value: object) -> str:
    """Formats a value for messages: at most 80 characters, with the full length if it is longer."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]!r}… ({len(value):,} characters)"
    return cut(_SHOWN.repr(value), _LONGEST)
