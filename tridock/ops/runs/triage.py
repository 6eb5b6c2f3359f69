"""Triage of a failed run: collects evidence from all its nodes and diagnoses the failure."""

import shlex
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.node_answers import Evidence
from tridock.engines import checkpoints_folder
from tridock.errors import Problem, RequestError, RunError
from tridock.ops.hosts.session import Session
from tridock.ops.runs.failed_run import RunFailedError, failed, failure_text, rank_to_look_at
from tridock.ops.runs.registry import Run, experiment_of, folder_of, list_runs
from tridock.remote import Host, on_all
from tridock.triage import Facts, facts_of

# Time limit per host: the host itself may be lost.
_PATIENCE_S: Final = 15.0


class PreemptedError(RunError):
    """A scheduler ended the run after it had saved."""

    exit_code = run_folder.EXIT_PREEMPTED


def check_exit(session: Session, run: Run, exit_code: int) -> None:
    """Raises :class:`RunError` if a run failed: the first rank to fail, the cause, and the fix."""
    if exit_code == run_folder.EXIT_STOPPED:
        raise RunError(Problem(run.run_id, "the run was stopped", "", f"its folder is {folder_of(session, run)}"))
    if exit_code == run_folder.EXIT_PREEMPTED:
        saved_in = checkpoints_folder(experiment_of(session, run), f"runs/{run.run_id}")
        todo = f"continue with --set {shlex.quote(f'train.load={saved_in}')}"
        raise PreemptedError(Problem(run.run_id, "the run was preempted and has saved a checkpoint", "", todo))
    if exit_code:
        raise _failed(session, run, collect(session, run, exit_code))


def _failed(session: Session, run: Run, facts: Facts) -> RunFailedError:
    options = f"{session.cluster.hosts_option} --run {run.run_id}"
    options += f" --rank {rank_to_look_at(facts)}" if facts.has_log else ""
    todo = f"look at {folder_of(session, run)}/logs, or tridock logs {options}"
    return failed(Problem(run.run_id, "the run failed", failure_text(facts), todo), facts)


def collect(session: Session, run: Run, exit_code: int | None) -> Facts:
    """Collects evidence from all nodes that answer: without shared files, each holds its own ranks' logs and events."""
    path = f"{run_folder.WORKSPACE}/runs/{run.run_id}"

    def ask(node: str, _: Host) -> Evidence:
        return session.ask(node, Evidence, "evidence", path, timeout=_PATIENCE_S)

    outcomes = on_all(session.hosts, ask, session.cluster.settings.ssh.max_connections, _PATIENCE_S)
    answers = {node: outcome.value for node, outcome in outcomes.items() if outcome.value}
    return facts_of(answers, run.head, exit_code)


def triage(session: Session, run_id: str | None) -> RunFailedError:
    """Diagnoses a failed run: the named one, or else the last that failed.

    Raises :class:`RequestError` if there is none, or if the named one did not fail.
    """
    listed = {run.run_id: run for run in list_runs(session)}
    failed_ones = [name for name, run in listed.items() if run.state.has_failed]
    chosen = run_id or (failed_ones[-1] if failed_ones else None)
    if chosen is None:
        raise RequestError(Problem("--run", "no run of this cluster has failed", "", "see tridock runs"))
    if chosen not in failed_ones:
        got = listed[chosen].state if chosen in listed else chosen
        what = "did not fail" if chosen in listed else "is not a run of this cluster"
        raise RequestError(Problem("--run", what, got, f"use one of: {', '.join(failed_ones[-5:]) or 'none'}"))
    run = Run(chosen, listed[chosen].head)
    return _failed(session, run, collect(session, run, listed[chosen].exit_code))
