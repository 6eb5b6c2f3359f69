"""What a rule is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One known way to fail. Everything that it asks for has to hold.

    ``cause`` and ``remedy`` may name ``{who}``, ``{node}`` and the named groups of ``says``.
    """

    name: str
    cause: str
    remedy: str
    origin: str
    """Where the words or the event come from."""
    says: re.Pattern[str] | None = None
    """Looked for in what the failed rank said, then at the end of its log, then of the launcher's."""
    own: bool = False
    """A message of Tridock's own; other rules are not asked about those."""
    late: bool = False
    """Asked only when no other words are known."""
    events: frozenset[str] = frozenset()
    """The supervisor's events that it is about."""
    kernel: bool = False
    """Only where the kernel said that it killed for memory."""
    memory: bool = False
    """The planner's numbers for the rank belong to it."""
    waits: bool = False
    """Ranks wait for one: the flight recorders may tell for which."""
    proof: Literal["provoked", "recorded"] = "provoked"
    """How the tests come to it: a real fault, or its words as upstream's source has them."""


def words(pattern: str) -> re.Pattern[str]:
    """A pattern over lines of text."""
    return re.compile(pattern, re.MULTILINE)
