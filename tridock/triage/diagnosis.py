"""From facts to the rule that knows them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tridock.errors import Problem
from tridock.triage.facts import Facts
from tridock.triage.rules import RULES, Rule

OWN_MESSAGE: Final = "own-message"
_LENGTH: Final = 240
_REPR: Final = re.compile(r"[\w.]+\(|[\w.]+(?:Error|Exception): ")
_CONTROL: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a rule makes of the facts. ``rule`` is its name; ``seen`` the line that it knew, and where that stands."""

    rule: str
    cause: str
    remedy: str
    seen: str = ""


def diagnose(facts: Facts) -> Diagnosis:
    """The first rule that fits: those about a certain event first, then what was said, then what is left."""
    for rule in RULES:
        if rule.events and rule.says and _asks_for(rule, facts) and (match := rule.says.search(facts.reason)):
            return _made(rule, facts, match, "")
    told = _own_message(facts)
    for where, text in _texts(facts):
        for rule in RULES:
            asked = not rule.events and not rule.late and (rule.own or where or not told)
            if asked and rule.says and (match := rule.says.search(text)):
                return _made(rule, facts, match, where)
        if told and not where:
            got = f" (got {printable(told.got)})" if told.got else ""
            return Diagnosis(OWN_MESSAGE, f"{printable(told.where)}: {printable(told.what)}{got}", printable(told.todo))
    for rule in RULES:
        match = rule.says.search(facts.reason) if rule.says and rule.late else None
        if _asks_for(rule, facts) and (match or not rule.says):
            return _made(rule, facts, match, "")
    raise AssertionError("the last rule asks for nothing")


def _own_message(facts: Facts) -> Problem | None:
    """A message of our own says what to do itself; not an exception's, nor that another rank has gone."""
    line = facts.reason.partition("\n")[0]
    consequence = facts.failure is not None and facts.failure.event.get("consequence")
    return None if consequence or _REPR.match(line) else Problem.parse(line)


def _asks_for(rule: Rule, facts: Facts) -> bool:
    return (not rule.events or facts.kind in rule.events) and (not rule.kernel or bool(facts.kernel))


def _texts(facts: Facts) -> Iterator[tuple[str, str]]:
    """Where a rule looks, the failed rank's own words first."""
    yield "", facts.reason
    if facts.log:
        assert facts.failure is not None
        yield f"logs/rank-{facts.failure.rank}.log", facts.log
    yield "logs/launcher.log", facts.launcher


def _made(rule: Rule, facts: Facts, match: re.Match[str] | None, where: str) -> Diagnosis:
    said = {} if match is None else {name: value or "" for name, value in match.groupdict().items()}
    known = {**{name: printable(value) for name, value in said.items()}, "who": facts.who, "node": _node(facts)}
    line = "" if match is None or not where else f"{printable(_line(match))} ({where})"
    cause = _filled(rule.cause, known).removesuffix(": ")
    notes = [facts.planned] if rule.memory and facts.planned else []
    notes += [facts.stuck] if rule.waits and facts.stuck else []
    notes += [f"the kernel said: {printable(facts.kernel[-1])}"] if rule.memory and facts.kernel else []
    return Diagnosis(rule.name, "; ".join([cause, *notes]), _filled(rule.remedy, known), line)


def _filled(template: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], ""), template)


def _node(facts: Facts) -> str:
    if facts.failure is None or facts.failure.agreed:
        return "the nodes"
    return facts.failure.node


def _line(match: re.Match[str]) -> str:
    """The whole line in which it was found."""
    text = match.string
    begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.start())
    return text[begin : end if end >= 0 else len(text)].strip()


def printable(text: str) -> str:
    """Without what a terminal would obey; cut to the length of a few lines."""
    clean = _CONTROL.sub("", text)
    return clean if len(clean) <= _LENGTH else f"{clean[:_LENGTH]}…"
