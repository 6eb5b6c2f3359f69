"""A line to the texts of a document, or to what is wrong with it. Nothing is mended and nothing is guessed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tridock.data.input.sources import Kind
from tridock.errors import Problem

_BOM: Final = b"\xef\xbb\xbf"
# Objects become tuples of their pairs, which keeps what a dict would drop: a key that stands there twice.
_decode: Final = json.JSONDecoder(object_pairs_hook=tuple).decode
Fields = list[list[str]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a line is no document. ``line`` counts from 0 within its chunk."""

    line: int
    what: str
    got: str
    data: bytes

    def problem(self, name: str, first_line: int, todo: str) -> Problem:
        """As a message about a file's line."""
        return Problem(f"{name}:{first_line + self.line}", self.what, self.got, todo)

    def record(self, name: str, first_line: int) -> bytes:
        """As a line of a rejects file: one object; ``text`` is the line itself, or ``base64`` where it is not UTF-8."""
        reason = f"{self.what}; got {self.got}" if self.got else self.what
        record: dict[str, object] = {"file": name, "line": first_line + self.line, "reason": reason}
        try:
            record["text"] = self.data.decode("utf-8")
        except UnicodeDecodeError:
            record["base64"] = base64.b64encode(self.data).decode()
        return json.dumps(record).encode() + b"\n"


@dataclass(slots=True)
class Documents:
    """The documents of a chunk, in order. ``texts[k]`` holds those of key k one after another, ``counts[k]`` how many
    of them belong to each document."""

    texts: list[list[str]]
    counts: list[list[int]]
    refused: list[Refusal] = field(default_factory=list)


class _UnfitError(Exception):
    def __init__(self, what: str, got: str = "") -> None:
        super().__init__(what, got)
        self.what, self.got = what, got


def remedy(keys: Sequence[str], kind: Kind) -> str:
    """What a user may do about a line that is refused."""
    fields = ", ".join(f'"{key}": "…"' for key in keys)
    form = "" if kind is Kind.TEXT else f"; each is one object such as {{{fields}}}"
    return f"mend or remove the line, or leave such out with --on-error skip --rejects FILE{form}"


def rejects_problems(on_error: str, rejects: Path | None) -> Iterator[Problem]:
    """What is wrong with ``--on-error`` and ``--rejects``."""
    if on_error == "skip" and rejects is None:
        todo = "name a file for the lines that are skipped"
        yield Problem("--rejects", "is missing, which --on-error skip needs", "", todo)
    if on_error == "stop" and rejects is not None:
        yield Problem("--rejects", "has no meaning without --on-error skip", str(rejects), "add that flag")
    if rejects is not None and not rejects.absolute().parent.is_dir():
        yield Problem("--rejects", "lies in a folder that does not exist", str(rejects), "make the folder")


def parse(data: bytes, keys: Sequence[str], kind: Kind) -> Documents:
    """The documents of whole lines: a text, or a list of texts (a sequence each), for every key of ``keys``."""
    found = Documents([[] for _ in keys], [[] for _ in keys])
    read = _plain if kind is Kind.TEXT else _quick_fields(keys)
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines):
        try:
            parts = read(line)
        except _UnfitError as unfit:
            found.refused.append(Refusal(number, unfit.what, unfit.got, line))
            continue
        for texts, counts, part in zip(found.texts, found.counts, parts, strict=True):
            texts += part
            counts.append(len(part))
    return found


def _plain(line: bytes) -> Fields:
    return [[_characters(line.removesuffix(b"\r"))]]


def _characters(line: bytes) -> str:
    if line.startswith(_BOM):
        raise _UnfitError("begins with a byte order mark", "EF BB BF")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _UnfitError("is not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}") from None


def _quick_fields(keys: Sequence[str]) -> Callable[[bytes], Fields]:
    """simdjson for the lines that have nothing special: twice as fast. What it does not take, ``_fields`` judges."""
    try:
        import simdjson
    except ImportError:
        return lambda line: _fields(line, keys)
    parse, object_type = simdjson.Parser().parse, simdjson.Object

    def read(line: bytes) -> Fields:
        found = None
        if not line.startswith(_BOM):  # which simdjson would pass over
            try:
                parsed = parse(line)
                if type(parsed) is object_type:
                    found = _plain_texts(parsed, keys)
            except (ValueError, RuntimeError):
                found = None
            # It must be let go before the next line: the parser's memory is used again.
            parsed = None
        return _fields(line, keys) if found is None else found

    return read


def _plain_texts(parsed: Any, keys: Sequence[str]) -> Fields | None:
    """The texts of an object where all is as it should be: no key stands there twice, and texts alone."""
    names = set(parsed.keys())
    if len(names) != len(parsed) or not names.issuperset(keys):
        return None
    values = [parsed[key] for key in keys]
    for value in values:
        if type(value) is not str:
            return None
    return [[value] for value in values]


def _fields(line: bytes, keys: Sequence[str]) -> Fields:
    text = _characters(line)
    try:
        pairs = _decode(text)
    except RecursionError:
        raise _UnfitError("is nested too deep") from None
    except ValueError as error:
        if not text.strip():
            raise _UnfitError("is blank") from None
        raise _UnfitError("is not valid JSON", str(error)) from None
    if not isinstance(pairs, tuple):
        raise _UnfitError("is not a JSON object", _shown(pairs))
    fields: dict[str, Any] = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        values = [value for name, value in pairs if name == twice]
        raise _UnfitError(f"has the key {_printable(twice)} more than once", _shown(values))
    return [_texts(fields, key) for key in keys]


def _texts(fields: dict[str, Any], key: str) -> list[str]:
    if key not in fields:
        names = ", ".join(sorted(fields)) or "(none)"
        raise _UnfitError(f"has no key {key!r}", f"the keys {_printable(names)}")
    value = fields[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise _UnfitError(f"has no text under {key!r}", _shown(value))
        if not text.isascii():
            _check_surrogates(text)
    return texts


def _check_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"U+{ord(text[error.start]):04X} at character {error.start + 1}"
        raise _UnfitError("holds half of a surrogate pair, which is no character", got) from None


def _shown(value: object) -> str:
    text = json.dumps(_plain_value(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _plain_value(value: object) -> object:
    """Pairs as the object that they were."""
    if isinstance(value, tuple):
        return {name: _plain_value(inner) for name, inner in value}
    return [_plain_value(inner) for inner in value] if isinstance(value, list) else value


def _printable(text: str) -> str:
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
