"""Sizes of a layout, and a line of the memory's bill."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

FORMAT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layout on nodes that all have as many slots."""

    data: int
    """Replicas of the model."""
    accumulation: int
    """Micro batches of an iteration, of each replica."""
    slots: int
    """Of one node."""


@dataclass(frozen=True, slots=True)
class Term:
    """Something that a rank holds: its name, its bytes, and where the formula comes from."""

    name: str
    bytes: int
    source: str


def total_bytes(terms: Iterable[Term]) -> int:
    """The sum."""
    return sum(term.bytes for term in terms)
