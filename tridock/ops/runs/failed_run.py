"""The error of a failed run: one line, with the cause below. Contacts no host."""

from tridock.errors import Problem, RunError
from tridock.triage import Facts, diagnose, report


class RunFailedError(RunError):
    """A run failed. The message is one line with the cause below. ``rule`` is the triage rule that matched."""

    def __init__(self, problem: Problem, why: str, rule: str) -> None:
        super().__init__(problem)
        self.why, self.rule = why, rule

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.why}"


def failed(problem: Problem, facts: Facts) -> RunFailedError:
    """Returns the error of a failed run with the diagnosis below it."""
    diagnosis = diagnose(facts)
    return RunFailedError(problem, report(facts, diagnosis), diagnosis.rule)


def failure_text(facts: Facts) -> str:
    """Returns a line such as ``exit code 4, rank 1 on host-b first: …``."""
    code = "no exit code" if facts.exit_code is None else f"exit code {facts.exit_code}"
    return code + (f", {facts.failure}" if facts.failure else "")


def rank_to_look_at(facts: Facts) -> int:
    """Returns the rank with the most useful log: the first to fail, or else the one that logs for all."""
    return (facts.failure.rank if facts.failure else None) or 0
