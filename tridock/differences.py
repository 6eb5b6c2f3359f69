"""Field-by-field comparison of documents: manifests, experiments, the arguments in a log."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

ABSENT: Final = "-"
"""Stands for a field that a document lacks."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which documents differ: its path, and its value in each document as text."""

    field: str
    values: tuple[str, ...]


def differences(documents: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ()) -> list[Difference]:
    """Returns the fields that differ between the documents, in order of first appearance.

    A field's path joins the names with dots (``data_sha256.data/x.idx``). Fields in ``ignored`` are left out with
    everything below them. Lists are compared as single values. 1 equals 1.0; true does not equal 1.
    """
    flat = [dict(flattened(document)) for document in documents]
    fields = dict.fromkeys(field for fields in flat for field in fields)
    found = []
    for field in fields:
        if any(field == name or field.startswith(f"{name}.") for name in ignored):
            continue
        values = tuple(fields.get(field, ABSENT) for fields in flat)
        if len(set(values)) > 1:
            found.append(Difference(field, values))
    return found


def flattened(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields every value with its path. An empty section counts as a value."""
    for name, value in document.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{path}.")
        else:
            yield path, shown(value)


def shown(value: Any) -> str:
    """Formats a value; equal values give equal texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, sort_keys=True, default=str)
