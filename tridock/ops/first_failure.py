"""Which rank of a failed run failed first: the others only lost it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tridock.errors import Problem

_LENGTH = 300


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """A rank, its node and the first line of what it said; ``agreed`` where every rank would have said the same."""

    rank: int
    node: str
    reason: str
    agreed: bool = False

    def __str__(self) -> str:
        return f"{'every rank' if self.agreed else f'rank {self.rank} on {self.node} first'}: {self.reason}"


def first_failure(events: Mapping[str, bytes], nodes: Mapping[int, str]) -> FirstFailure | None:
    """Reads what each node holds of ``events.jsonl``; ``nodes`` maps all ranks to their nodes.

    Nodes may share the file, and their clocks may differ: a rank that failed of itself comes before any that lost
    another or was told to end, whatever the time says. Where all only lost another, it was one that said nothing.
    """
    failures = {json.dumps(event, sort_keys=True): event for event in _failures(events.values())}
    if not failures:
        return None
    first = min(failures.values(), key=lambda event: (bool(event.get("consequence")), str(event.get("time"))))
    spoke = {int(event["rank"]) for event in failures.values()}
    silent = [rank for rank in nodes if rank not in spoke]
    if first.get("consequence") and silent:
        return FirstFailure(silent[0], nodes[silent[0]], _without_a_word(silent[1:]))
    rank = int(first["rank"])
    return FirstFailure(rank, nodes.get(rank, "an unknown node"), _essence(first), bool(first.get("agreed")))


def _without_a_word(others: Sequence[int]) -> str:
    """Of ranks that the others lost: a signal ended them, from the kernel where memory ran out."""
    too = f", as did {', '.join(str(rank) for rank in others)}" if others else ""
    return f"ended without a word{too} (killed by a signal, perhaps because memory ran out: see dmesg there)"


def _essence(event: Mapping[str, Any]) -> str:
    """The first line of a reason, and of a message of ours what is wrong; the log has the rest."""
    lines = str(event.get("reason") or "").strip().splitlines() or ["no reason on record"]
    problem = Problem.parse(lines[0])
    return (f"{problem.where}: {problem.what}" if problem else lines[0])[:_LENGTH]


def _failures(files: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for content in files:
        for line in content.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the last line of a node that died while it wrote
            if isinstance(event, dict) and event.get("event") == "run_failed" and "rank" in event:
                yield event
