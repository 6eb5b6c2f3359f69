"""Matches the facts to a rule of ``rules.yaml``, and writes the report for the user. Pure."""

import re
import shlex
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from tridock.contracts.events import Cause, Event
from tridock.strict_yaml import read_text
from tridock.triage.facts import Facts
from tridock.yaml_text import parse_yaml


@dataclass(frozen=True, slots=True)
class Rule:
    """One known failure: a cause code of Tridock's, or a pattern of upstream's messages.

    ``cause`` and ``remedy`` may name ``{who}``, ``{node}``, the ``{file}`` of the failure's event, and the named groups
    of ``says``.
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
    killed: bool = False
    """Only if the counter of a node's container has risen: the kernel has killed a process for memory in the run."""
    kernel: bool = False
    """Only if the kernel has logged an out-of-memory kill."""
    memory: bool = False
    """Adds the planner's memory of the rank to the cause."""
    waits: bool = False
    """Ranks wait for one rank: adds the rank that the flight recorders identify."""
    proof: Literal["provoked", "recorded"] = "provoked"
    """How the tests cover the rule: with a real fault, or with recorded upstream text."""


def _read() -> Iterator[Rule]:
    path = Path(__file__).with_name("rules.yaml")
    for name, fields in parse_yaml(read_text(path, "the rules of triage"), str(path)).items():
        causes = map(Cause, fields.pop("causes", ()))
        events = [Event(it) if it in tuple(Event) else Cause(it) for it in fields.pop("events", ())]
        says = "|".join(fields.pop("says", ()))
        pattern = re.compile(says, re.MULTILINE) if says else None
        yield Rule(name, **fields, causes=frozenset(causes), events=frozenset(events), says=pattern)


RULES: Final = tuple(_read())
"""The last rule matches every failure."""


OWN_MESSAGE: Final = "own-message"
_LENGTH: Final = 240
_CONTROL: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a rule. ``rule`` is its name; ``seen`` the line that it matched, and where that line is."""

    rule: str
    cause: str
    remedy: str
    seen: str = ""


def diagnose(facts: Facts) -> Diagnosis:
    """Returns the first rule that matches the failure's cause code or its text; then the remaining rules."""
    for where, text in _texts(facts):
        for rule in RULES:
            if rule.last:
                continue
            if not where and facts.cause in rule.causes:
                return _made(rule, facts, None, "")
            asked = rule.own or where or facts.own_error is None
            asked = asked and _has_event(rule, facts) and (bool(facts.killed) or not rule.killed)
            if asked and rule.says and (match := rule.says.search(text)):
                return _made(rule, facts, match, where)
        if (own := facts.own_error) is not None and not where:
            got = f" (got {printable(own.got)})" if own.got else ""
            cause = "; ".join([f"{printable(own.where)}: {printable(own.what)}{got}", *_beside(facts)])
            return Diagnosis(OWN_MESSAGE, cause, printable(own.todo))
    for rule in (rule for rule in RULES if rule.last):
        match = rule.says.search(facts.upstream) if rule.says else None
        if (
            match
            or facts.cause in rule.causes
            or (not rule.causes and _has_event(rule, facts) and _has_evidence(rule, facts))
        ):
            return _made(rule, facts, match, "")
    raise AssertionError("the last rule fits every failure")


def _has_evidence(rule: Rule, facts: Facts) -> bool:
    return (bool(facts.kernel) or not rule.kernel) and (bool(facts.killed) or not rule.killed)


def _has_event(rule: Rule, facts: Facts) -> bool:
    return not rule.events or not rule.events.isdisjoint((facts.kind, facts.cause))


def _texts(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yields the texts that rules search, the failed rank's own reason first."""
    yield "", facts.upstream
    if facts.log:
        assert facts.failure is not None
        yield f"logs/rank-{facts.failure.rank}.log" if facts.has_log else "logs/launcher.log", facts.log
    yield "logs/launcher.log", facts.launcher


def _made(rule: Rule, facts: Facts, match: re.Match[str] | None, where: str) -> Diagnosis:
    groups = {} if match is None else {name: value or "" for name, value in match.groupdict().items()}
    known = {**{name: printable(value) for name, value in groups.items()}, "who": facts.who, "node": _node(facts)}
    known["killed"] = ", ".join(map(printable, facts.killed))
    known["file"] = shlex.quote(_CONTROL.sub("", facts.file))
    line = "" if match is None or not where else f"{printable(_line(match))} ({where})"
    cause = _filled(rule.cause, known).rstrip(": ")
    notes = [facts.planned] if rule.memory and facts.planned else []
    notes += [facts.stuck] if rule.waits and facts.stuck else []
    notes += [f"the kernel logged: {printable(facts.kernel[-1])}"] if rule.memory and facts.kernel else []
    named = rule.killed or Cause.RANK_KILLED_FOR_MEMORY in rule.causes
    notes += _beside(replace(facts, killed={}) if named else facts)
    return Diagnosis(rule.name, "; ".join([cause, *notes]), _filled(rule.remedy, known), line)


def _beside(facts: Facts) -> list[str]:
    """Returns notes of processes that the kernel killed in the same attempt, of links that went down, and of clocks."""
    where = ", ".join(f"{count} on {printable(node)}" for node, count in facts.killed.items())
    killed = [f"the kernel killed processes for memory in this attempt: {where}"] if where else []
    return [*killed, *map(printable, facts.beside)]


def _filled(template: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], ""), template)


def _node(facts: Facts) -> str:
    if facts.failure is None or facts.failure.agreed:
        return "the nodes"
    return facts.failure.node


def _line(match: re.Match[str]) -> str:
    text = match.string
    begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.start())
    return text[begin : end if end >= 0 else len(text)].strip()


def printable(text: str) -> str:
    """Removes terminal control sequences; truncates to a few lines."""
    clean = _CONTROL.sub("", text)
    return clean if len(clean) <= _LENGTH else f"{clean[:_LENGTH]}…"


def report(facts: Facts, diagnosis: Diagnosis) -> str:
    """Returns a line each for the failed rank, its message, the last steps, the cause and the remedy."""
    return "\n".join(f"  {name:<8} {text}" for name, text in _lines(facts, diagnosis))


def _lines(facts: Facts, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    time = "" if facts.failure is None else str(facts.failure.event.get("time", ""))
    yield "first", facts.who + (f", {time[:19].replace('T', ' ')} UTC" if time else "")
    if facts.reason:
        yield "error", printable(facts.reason.splitlines()[0])
    losses = [(it.iteration, "not finite" if it.loss is None else f"{it.loss:.4f}") for it in facts.steps]
    yield "steps", ", ".join(f"{iteration}: {loss}" for iteration, loss in losses) or "none was logged"
    if diagnosis.seen:
        yield "seen", diagnosis.seen
    yield "cause", diagnosis.cause
    yield "remedy", diagnosis.remedy
    yield "rule", f"{diagnosis.rule} (docs/triage.md)"
