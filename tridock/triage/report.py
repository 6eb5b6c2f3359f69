"""A diagnosis for people: what stands beneath the one line of a run that failed."""

from __future__ import annotations

from collections.abc import Iterator

from tridock.triage.diagnosis import Diagnosis, printable
from tridock.triage.facts import Facts


def report(facts: Facts, diagnosis: Diagnosis) -> str:
    """A line each for who, what it said, the last steps, the cause, what to do."""
    return "\n".join(f"  {name:<8} {text}" for name, text in _lines(facts, diagnosis))


def _lines(facts: Facts, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    time = "" if facts.failure is None else str(facts.failure.event.get("time", ""))
    yield "first", facts.who + (f", {time[:19].replace('T', ' ')} UTC" if time else "")
    if facts.reason:
        yield "error", printable(facts.reason.splitlines()[0])
    if facts.steps:
        yield (
            "steps",
            ", ".join(
                f"{step.iteration}: {'not finite' if step.loss is None else f'{step.loss:.4f}'}" for step in facts.steps
            ),
        )
    else:
        yield "steps", "none was logged"
    if diagnosis.seen:
        yield "seen", diagnosis.seen
    yield "cause", diagnosis.cause
    yield "remedy", diagnosis.remedy
    yield "rule", f"{diagnosis.rule} (docs/triage.md)"
