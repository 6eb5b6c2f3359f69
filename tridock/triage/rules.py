"""The rules of ``rules.yaml``, in the order in which they are tried."""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tridock.contracts.events import Cause, Event
from tridock.strict_yaml import read_text
from tridock.yaml_text import parse_yaml


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
    """The events that a rule without codes is about; none: all."""
    kernel: bool = False
    """Only where the kernel has logged that it killed for memory."""
    memory: bool = False
    """Adds the planner's memory of the rank to the cause."""
    waits: bool = False
    """Ranks wait for one: adds the rank that the flight recorders name."""
    proof: Literal["provoked", "recorded"] = "provoked"
    """How the tests reach it: a real fault, or upstream's text on record."""


def _read() -> Iterator[Rule]:
    path = Path(__file__).with_name("rules.yaml")
    for name, fields in parse_yaml(read_text(path, "the rules of triage"), str(path)).items():
        causes, events = map(Cause, fields.pop("causes", ())), map(Event, fields.pop("events", ()))
        says = "|".join(fields.pop("says", ()))
        pattern = re.compile(says, re.MULTILINE) if says else None
        yield Rule(name, **fields, causes=frozenset(causes), events=frozenset(events), says=pattern)


RULES: Final = tuple(_read())
"""The last one fits every failure."""
