"""The facts of a failed run, from the evidence of its nodes (``tridock.node evidence``)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tridock.contracts.events import Cause
from tridock.contracts.node_answers import Evidence
from tridock.errors import Problem
from tridock.triage.first_failure import FirstFailure, evidence_beside, first_failure, memory_kills

_STEPS: Final = 5
_GIB: Final = 2**30
_RAISED: Final = re.compile(
    r"^(?P<node>(?:(?!\[rank)\S+: )?)(?P<rank>(?:\[rank\d+\]: )?)Traceback \(most recent call last\):\n"
    r"(?:(?P=node)(?P=rank)(?: .*)?\n)*(?P=node)(?P=rank)(\S.*)",
    re.MULTILINE,
)
"""A traceback up to its last line. Tridock prefixes each line of several nodes with the node, torch with the rank."""
_OF_PYTHON: Final = 1 << 8
"""The wait status of a Python program that an exception has ended."""


@dataclass(frozen=True, slots=True)
class Step:
    """A logged iteration; the loss is None if it was not finite."""

    iteration: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Facts:
    exit_code: int | None
    """None if nothing recorded one, because the run was lost."""
    failure: FirstFailure | None = None
    reason: str = ""
    """The failed rank's complete message, or the supervisor's observation of it."""
    log: str = ""
    """The end of the rank's log, or torch's output of its exception."""
    launcher: str = ""
    """The end of the launcher's output since the last start."""
    steps: tuple[Step, ...] = ()
    planned: str = ""
    """The planned memory of the rank, as text; empty if the plan has none."""
    kernel: tuple[str, ...] = ()
    """Memory messages of the node's kernel during the run, if they can be read."""
    killed: Mapping[str, int] = field(default_factory=dict)
    """How many processes the kernel killed for memory, by node, in the failed attempt."""
    beside: tuple[str, ...] = ()
    """Links that failed in the failed attempt, and clocks that differ, as text."""
    stuck: str = ""
    """The rank that the others wait for, according to all flight recorders."""
    has_log: bool = True
    """Whether the rank has its own log; otherwise all output is the launcher's."""

    @property
    def kind(self) -> str:
        """The name of the event that records the failure; empty if there is none."""
        return "" if self.failure is None else str(self.failure.event.get("event", ""))

    @property
    def cause(self) -> str:
        """The cause code of the failure; empty if no event records it."""
        return "" if self.failure is None else str(self.failure.event.get("cause", ""))

    @property
    def file(self) -> str:
        """The file that the failure's event names; empty if it names none."""
        return "" if self.failure is None else str(self.failure.event.get("path", ""))

    @property
    def own_error(self) -> Problem | None:
        """The Tridock error that made the run fail, which includes a remedy; None if it is only a consequence."""
        if self.failure is None or self.failure.event.get("consequence"):
            return None
        return self.failure.problem

    @property
    def upstream(self) -> str:
        """The upstream part of the reason: an exception, or the value in a Tridock error."""
        if self.failure is None or self.failure.seen:
            return ""
        return self.reason if self.failure.problem is None else self.failure.problem.got

    @property
    def who(self) -> str:
        if self.failure is None:
            return "the launcher"
        if self.failure.agreed:
            return "every rank"
        return self.failure.node if self.failure.rank is None else f"rank {self.failure.rank} on {self.failure.node}"


def facts_of(answers: Mapping[str, Evidence], head: str, exit_code: int | None) -> Facts:
    """Returns the facts from the nodes' answers; the head's has the plan, the metrics and the launcher's output."""
    answer = answers.get(head, Evidence())
    ranks = {int(entry["rank"]): entry for entry in answer.plan.get("ranks", ())}
    nodes = {rank: str(entry["node"]) for rank, entry in ranks.items()}
    events = {node: answer.events for node, answer in answers.items()}
    first = first_failure(events, nodes)
    rank = None if first is None else first.rank
    logs = {number: text for answer in answers.values() for number, text in answer.logs.items()}
    log = "" if rank is None else logs.get(rank) or answer.printed.get(rank, "")
    return Facts(
        exit_code,
        first,
        reason=_reason(first, log, answer.launcher),
        log=log,
        launcher=answer.launcher,
        steps=tuple(Step(int(it["iteration"]), it.get("loss")) for it in answer.metrics if "split" not in it)[-_STEPS:],
        planned="" if rank is None else _planned(answer.plan, ranks.get(rank)),
        kernel=answers.get("" if first is None else first.node, Evidence()).kernel,
        killed=memory_kills(events),
        beside=evidence_beside(events),
        stuck=stuck_rank([answer.last_collectives for answer in answers.values()], nodes),
        has_log=(rank or 0) in logs,
    )


def _reason(first: FirstFailure | None, log: str, launcher: str) -> str:
    if first is None:
        return ""
    reason = str(first.event.get("reason") or first.reason)
    if first.event.get("rank") != first.rank:  # the event is from a rank that waited for it
        return f"{first.reason}\n{reason}"
    if first.event.get("cause") in (Cause.RANK_EXITED, Cause.RANK_GONE) and (raised := _RAISED.findall(log)):
        return str(raised[-1][2])
    is_raised = first.event.get("wait_status") == _OF_PYTHON or first.event.get("cause") == Cause.PROGRAM_FAILED
    if not log and is_raised:  # the program's launcher prints errors of its own after that of the rank
        printed = (error for node, _, error in _RAISED.findall(launcher) if node in ("", f"{first.node}: "))
        return next(printed, reason)
    # An exception's repr omits a file's name; the last line of its traceback includes it.
    name = re.match(r"(\w+)\(", reason)
    traced = name and re.findall(rf"^(?:\w+\.)*{name[1]}: .+", log, re.MULTILINE)
    return str(traced[-1]) if traced else reason


def _planned(plan: Mapping[str, Any], entry: Mapping[str, Any] | None) -> str:
    memory = plan.get("memory") or {}
    stages = {stage["stage"]: stage for stage in memory.get("stages", ())}
    stage = None if entry is None else stages.get(entry.get("pp", 0))
    if stage is None:
        return ""
    largest = sorted(stage["terms"], key=lambda term: -int(term["bytes"]))[:3]
    terms = ", ".join(f"{term['name']} {_size(term['bytes'])}" for term in largest)
    whole = f"the plan expects {_size(stage['total_bytes'])} for a rank of stage {stage['stage']} ({terms})"
    limit = memory.get("limit_gib")
    return whole if limit is None else f"{whole}, of the {limit:.1f} GiB of a {memory['gpu']}"


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.1f} MiB"


def stuck_rank(last_collectives: Sequence[Mapping[int, int]], nodes: Mapping[int, str]) -> str:
    """Returns the rank that the others wait for: ``last_collectives`` has each node's numbers by rank."""
    reached = {rank: number for numbers in last_collectives for rank, number in numbers.items()}
    if len(reached) < 2 or min(reached.values()) == max(reached.values()):
        return ""
    rank = min(reached, key=lambda rank: (reached[rank], rank))
    node = nodes.get(rank, "an unknown node")
    return f"rank {rank} on {node} came to collective {reached[rank]}, the others to {max(reached.values())}"
