"""Parses lines into documents. Invalid lines are rejected with a reason; nothing is repaired or guessed."""

import base64
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tridock.data.input.sources import Kind
from tridock.errors import Problem, RequestError

_BOM: Final = b"\xef\xbb\xbf"
# Objects become tuples of pairs, because a dict would drop duplicate keys.
_decode: Final = json.JSONDecoder(object_pairs_hook=tuple).decode
Fields = list[list[str]]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a line was rejected. ``line`` counts from 0 within its chunk."""

    line: int
    what: str
    got: str
    data: bytes
    todo: str = ""

    def problem(self, name: str, first_line: int, form: str) -> Problem:
        """Returns a message with file and line, and with the ``form`` of a line if there is no better remedy."""
        todo, form = (self.todo, "") if self.todo else ("correct or remove the line", form)
        skip = "or skip such lines with --on-error skip --rejects FILE"
        return Problem(f"{name}:{first_line + self.line}", self.what, self.got, f"{todo}, {skip}{form}")

    def record(self, name: str, first_line: int) -> bytes:
        """Returns a line for the rejects file: an object with ``text``, or ``base64`` if the line is not UTF-8."""
        reason = f"{self.what}; got {self.got}" if self.got else self.what
        record: dict[str, object] = {"file": name, "line": first_line + self.line, "reason": reason}
        try:
            record["text"] = self.data.decode("utf-8")
        except UnicodeDecodeError:
            record["base64"] = base64.b64encode(self.data).decode()
        return json.dumps(record).encode() + b"\n"


@dataclass(slots=True)
class Documents:
    """The documents of a chunk. ``texts[k]`` has the texts of key k, ``counts[k]`` the number of texts per document."""

    texts: list[list[str]]
    counts: list[list[int]]
    rejected_lines: list[Rejection] = field(default_factory=list)


class _RejectedError(Exception):
    def __init__(self, what: str, got: str = "", todo: str = "") -> None:
        super().__init__(what, got, todo)
        self.what, self.got, self.todo = what, got, todo


def form_of(keys: Sequence[str], kind: Kind) -> str:
    """Returns what a message about an invalid line says of valid ones."""
    fields = ", ".join(f'"{key}": "…"' for key in keys)
    return "" if kind is Kind.TEXT else f"; each is one object such as {{{fields}}}"


def check_share(documents: int, rejected: int, most: float, example: Problem | None) -> None:
    """Raises :class:`RequestError` if more than the share ``most`` of the documents, or all of them, were rejected."""
    if rejected > most * documents or rejected == documents > 0:
        such = f", such as {example.where}: {example.what}" if example else ""
        todo = "correct the input (leave --on-error skip out for the remedy)"
        todo += ", or raise --max-rejects" if rejected < documents else ""
        raise RequestError(Problem("--input", "has too many invalid lines", f"{rejected} of {documents}{such}", todo))


def rejects_problems(on_error: str, rejects: Path | None, most: float) -> Iterator[Problem]:
    """Yields the problems of the options ``--on-error``, ``--rejects`` and ``--max-rejects``."""
    if not 0 <= most <= 1:
        yield Problem("--max-rejects", "is not a share from 0 to 1", str(most), "give 0.1 for a tenth of the lines")
    if on_error == "skip" and rejects is None:
        todo = "name a file for the skipped lines"
        yield Problem("--rejects", "is required with --on-error skip", "", todo)
    if on_error == "stop" and rejects is not None:
        yield Problem("--rejects", "has no effect without --on-error skip", str(rejects), "add it")
    if rejects is not None and not rejects.absolute().parent.is_dir():
        yield Problem("--rejects", "is in a folder that does not exist", str(rejects), "create the folder")


def parse(data: bytes, keys: Sequence[str], kind: Kind) -> Documents:
    """Parses whole lines. The value of each key is a text, or a list of texts that become a sequence each."""
    found = Documents([[] for _ in keys], [[] for _ in keys])
    read = _plain if kind is Kind.TEXT else _fast_fields(keys)
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines):
        try:
            parts = read(line)
        except _RejectedError as rejected:
            found.rejected_lines.append(Rejection(number, rejected.what, rejected.got, line, rejected.todo))
            continue
        for texts, counts, part in zip(found.texts, found.counts, parts, strict=True):
            texts += part
            counts.append(len(part))
    return found


def is_object(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    try:
        return isinstance(_decode(line.decode("utf-8")), tuple)
    except (ValueError, RecursionError):
        return False


def _plain(line: bytes) -> Fields:
    return [[_characters(line.removesuffix(b"\r"))]]


def _characters(line: bytes) -> str:
    if line.startswith(_BOM):
        todo = r"remove it: sed 's/^\xEF\xBB\xBF//' FILE > NEW"
        raise _RejectedError("begins with a byte order mark", "EF BB BF", todo)
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        todo = "convert the file, such as with iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
        raise _RejectedError("is not UTF-8", got, todo) from None


def _fast_fields(keys: Sequence[str]) -> Callable[[bytes], Fields]:
    """Returns a parser that uses simdjson, twice as fast, for ordinary lines, and ``_fields`` for all others."""
    try:
        import simdjson
    except ImportError:
        return lambda line: _fields(line, keys)
    parse, object_type = simdjson.Parser().parse, simdjson.Object

    def read(line: bytes) -> Fields:
        found = None
        if not line.startswith(_BOM):  # simdjson ignores a byte order mark
            try:
                parsed = parse(line)
                if type(parsed) is object_type:
                    found = _plain_texts(parsed, keys)
            except (ValueError, RuntimeError):
                found = None
            # Release it before the next line: the parser reuses its memory.
            parsed = None
        return _fields(line, keys) if found is None else found

    return read


def _plain_texts(parsed: Any, keys: Sequence[str]) -> Fields | None:
    """Returns the texts of an object without duplicate keys and with plain texts only; else None."""
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
        raise _RejectedError("is nested too deep") from None
    except ValueError as error:
        if not text.strip():
            raise _RejectedError("is blank") from None
        raise _RejectedError("is not valid JSON", str(error), _one_per_line(text)) from None
    if not isinstance(pairs, tuple):
        raise _RejectedError("is not a JSON object", _excerpt(pairs), _one_per_line(text))
    return [_texts(pairs, key) for key in keys]


def _unique(pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        values = [value for name, value in pairs if name == twice]
        raise _RejectedError(f"has the key {_printable(twice)} more than once", _excerpt(values))
    return fields


def _one_per_line(text: str) -> str:
    """Returns the remedy for a line that begins an array, or an object of several lines."""
    if text.startswith("["):
        return "write an object per line: jq -c '.[]' FILE > NEW.jsonl"
    return "write an object per line: jq -c . FILE > NEW.jsonl" if text.strip() == "{" else ""


def _lengths(pairs: tuple[tuple[str, Any], ...], above: str = "") -> Iterator[tuple[int, str]]:
    """Yields the length of every text in an object, and its key."""
    for name, value in pairs:
        if isinstance(value, str):
            yield len(value), above + name
        elif isinstance(value, tuple):
            yield from _lengths(value, f"{above}{name}.")


def _texts(pairs: tuple[tuple[str, Any], ...], key: str) -> list[str]:
    fields, name = _unique(pairs), key
    while name not in fields:  # data.text is text in data, unless there is a key of this name
        outer, _, name = name.partition(".")
        if not name or not isinstance(fields.get(outer), tuple):
            names = ", ".join(sorted(dict(pairs))) or "(none)"
            _, longest = max(_lengths(pairs), default=(0, "KEY"))
            todo = f"name the key of the texts, such as --json-keys {shlex.quote(longest)}"
            raise _RejectedError(f"has no key {key!r}", f"the keys {_printable(names)}", todo)
        fields = _unique(fields[outer])
    value = fields[name]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise _RejectedError(f"has no text under {key!r}", _excerpt(value))
        if not text.isascii():
            _check_surrogates(text)
    return texts


def _check_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"U+{ord(text[error.start]):04X} at character {error.start + 1}"
        raise _RejectedError("contains a lone surrogate, which is not a character", got) from None


def _excerpt(value: object) -> str:
    try:
        text = json.dumps(_plain_value(value))
    except RecursionError:
        text = "deeply nested values"
    return text if len(text) <= 60 else text[:57] + "..."


def _plain_value(value: object) -> object:
    """Turns tuples of pairs back into objects."""
    if isinstance(value, tuple):
        return {name: _plain_value(inner) for name, inner in value}
    return [_plain_value(inner) for inner in value] if isinstance(value, list) else value


def _printable(text: str) -> str:
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 60 else text[:57] + "..."
