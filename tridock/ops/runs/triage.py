"""Triage of a failed run: collects evidence from all its nodes and diagnoses the failure."""

from dataclasses import asdict
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.node_answers import Evidence
from tridock.errors import Problem, RequestError, RunError, printable
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs.cluster_runs import Run, folder_of, list_runs
from tridock.remote import Host
from tridock.triage import Facts, diagnose, facts_of, report


class RunFailedError(RunError):
    """A run failed. The message is one line with the diagnosis of the facts below."""

    def __init__(self, problem: Problem, facts: Facts) -> None:
        super().__init__(problem)
        self.facts, self.diagnosis = facts, diagnose(facts)

    @property
    def document(self) -> dict[str, Any]:
        """Returns what ``--json`` prints."""
        (problem,), failure = self.problems, self.facts.failure
        of_rank = None
        if failure is not None:
            of_rank = {
                "event": self.facts.kind, "cause": self.facts.cause or None, "rank": failure.rank, "node": failure.node,
                "reason": failure.reason,
            }  # fmt: skip
        return {
            "run": problem.where, "exit_code": self.facts.exit_code, "failure": of_rank,
            "diagnosis": asdict(self.diagnosis), "see": problem.todo,
        }  # fmt: skip

    def __str__(self) -> str:
        return printable(f"{super().__str__()}\n{report(self.facts, self.diagnosis)}")


def failure_text(facts: Facts) -> str:
    """Returns a line such as ``exit code 4, rank 1 on host-b first: …``."""
    code = "no exit code" if facts.exit_code is None else f"exit code {facts.exit_code}"
    return code + (f", {facts.failure}" if facts.failure else "")


def rank_to_look_at(facts: Facts) -> int:
    """Returns the rank with the most useful log: the first to fail, or else the one that logs for all."""
    return (facts.failure.rank if facts.failure else None) or 0


# Time limit per host: the host itself may be lost.
_PATIENCE_S: Final = 15.0


class PreemptedError(RunError):
    """A scheduler ended the run after it had saved."""

    exit_code = run_folder.EXIT_PREEMPTED


def check_exit(client: NodeClient, run: Run, exit_code: int) -> None:
    """Raises :class:`RunError` if a run failed: the first rank to fail, the cause, and the fix."""
    if exit_code == run_folder.EXIT_STOPPED:
        raise RunError(Problem(run.run_id, "the run was stopped", "", f"its folder is {folder_of(client, run)}"))
    if exit_code == run_folder.EXIT_PREEMPTED:
        todo = f"continue it with tridock resume {client.cluster.hosts_option} --run {run.run_id}"
        raise PreemptedError(Problem(run.run_id, "the run was preempted and has saved a checkpoint", "", todo))
    if exit_code:
        raise _failed(client, run, collect(client, run, exit_code))


def _failed(client: NodeClient, run: Run, facts: Facts) -> RunFailedError:
    options = f"{client.cluster.hosts_option} --run {run.run_id}"
    options += f" --rank {rank_to_look_at(facts)}" if facts.has_log else ""
    todo = f"look at {folder_of(client, run)}/logs, or tridock logs {options}"
    return RunFailedError(Problem(run.run_id, "the run failed", failure_text(facts), todo), facts)


def collect(client: NodeClient, run: Run, exit_code: int | None) -> Facts:
    """Collects evidence from all nodes that answer: without shared files, each holds its own ranks' logs and events."""
    path = f"{run_folder.WORKSPACE}/runs/{run.run_id}"

    def ask(node: str, _: Host) -> Evidence:
        return client.ask(node, Evidence, "evidence", path, timeout=_PATIENCE_S)

    outcomes = client.hosts.try_each(ask)
    answers = {node: outcome.value for node, outcome in outcomes.items() if outcome.value}
    return facts_of(answers, run.head, exit_code)


def triage(client: NodeClient, run_id: str | None) -> RunFailedError | str:
    """Diagnoses a failed run: the named one, or else the last that failed; returns a text if it did not fail.

    Raises :class:`RequestError` if there is no such run.
    """
    listed = {run.run_id: run for run in list_runs(client)}
    failed_ones = [name for name, run in listed.items() if run.state.has_failed]
    chosen = run_id or (failed_ones[-1] if failed_ones else None)
    if chosen is None:
        return "no run of this cluster has failed"
    if chosen not in listed:
        todo = f"use one of: {', '.join(failed_ones[-5:]) or 'none'}"
        raise RequestError(Problem("--run", "is not a run of this cluster", chosen, todo))
    if chosen not in failed_ones:
        return f"{chosen}: did not fail: {listed[chosen].state}"
    run = Run(chosen, listed[chosen].head)
    return _failed(client, run, collect(client, run, listed[chosen].exit_code))
