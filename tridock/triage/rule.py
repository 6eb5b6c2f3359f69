"""What a rule is."""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from tridock.contracts.events import Cause, Event


@dataclass(frozen=True, slots=True)
class Rule:
    """One known way to fail: a cause code of Tridock's own, or what upstream's messages say of it.

    ``cause`` and ``remedy`` may name ``{who}``, ``{node}`` and the named groups of ``says``.
    """

    name: str
    cause: str
    remedy: str
    origin: str
    """Where the text or the event comes from."""
    causes: Set[Cause] = frozenset()
    """The codes that the failure's event may carry."""
    says: re.Pattern[str] | None = None
    """Upstream's text: in the reason of the failed rank, then at the end of its log, then of the launcher's."""
    own: bool = False
    """Also searched in the value (``got``) of one of Tridock's own errors, which has a remedy itself."""
    last: bool = False
    """Tried only when no text is known."""
    events: Set[Event] = frozenset()
    """The events that a rule without codes and text is about; none: all."""
    kernel: bool = False
    """Only where the kernel has logged that it killed for memory."""
    memory: bool = False
    """Adds the planner's memory of the rank to the cause."""
    waits: bool = False
    """Ranks wait for one: adds the rank that the flight recorders name."""
    proof: Literal["provoked", "recorded"] = "provoked"
    """How the tests reach it: a real fault, or upstream's text on record."""


def regex(pattern: str) -> re.Pattern[str]:
    """A pattern over lines of text."""
    return re.compile(pattern, re.MULTILINE)
