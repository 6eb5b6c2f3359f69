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
    """One known failure: a cause code of Tridock's, or a pattern of upstream's messages.

    ``cause`` and ``remedy`` may name ``{who}``, ``{node}`` and the named groups of ``says``.
    """

    name: str
    cause: str
    remedy: str
    origin: str
    """The source of the text or the event."""
    causes: Set[Cause] = frozenset()
    """The cause codes that the failure's event may have."""
    says: re.Pattern[str] | None = None
    """Pattern of upstream's text, searched in the failed rank's reason, then its log's end, then the launcher's."""
    own: bool = False
    """Also search the value (``got``) of a Tridock error, which has its own remedy."""
    last: bool = False
    """Try the rule only if no text matches another."""
    events: Set[Event | Cause] = frozenset()
    """The events, or the cause codes of events, that a rule's text applies to; empty: all."""
    kernel: bool = False
    """Only if the kernel has logged an out-of-memory kill."""
    memory: bool = False
    """Adds the planner's memory of the rank to the cause."""
    waits: bool = False
    """Ranks wait for one rank: adds the rank that the flight recorders identify."""
    proof: Literal["provoked", "recorded"] = "provoked"
    """How the tests cover the rule: with a real fault, or with recorded upstream text."""


def _event_or_cause(name: str) -> Event | Cause:
    return Event(name) if name in tuple(Event) else Cause(name)


def _read() -> Iterator[Rule]:
    path = Path(__file__).with_name("rules.yaml")
    for name, fields in parse_yaml(read_text(path, "the rules of triage"), str(path)).items():
        causes, events = map(Cause, fields.pop("causes", ())), map(_event_or_cause, fields.pop("events", ()))
        says = "|".join(fields.pop("says", ()))
        pattern = re.compile(says, re.MULTILINE) if says else None
        yield Rule(name, **fields, causes=frozenset(causes), events=frozenset(events), says=pattern)


RULES: Final = tuple(_read())
"""The last rule matches every failure."""
