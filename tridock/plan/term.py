"""A line of the memory's bill."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """Something that a rank holds: its name, its bytes, and where the formula comes from."""

    name: str
    bytes: int
    source: str


def total_bytes(terms: Iterable[Term]) -> int:
    """The sum."""
    return sum(term.bytes for term in terms)
