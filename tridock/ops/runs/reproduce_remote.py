"""Repeats a run on a cluster: fetches its folder, starts the new run as any other, and compares both."""

from pathlib import Path

from tridock.contracts.run_folder import EXPERIMENT, REPRODUCTION
from tridock.errors import TridockError
from tridock.experiment import is_command
from tridock.launchers.bundle import RunBundle
from tridock.ops.hosts.session import Session
from tridock.ops.runs import command
from tridock.ops.runs import launch as launch_
from tridock.ops.runs.fetch import fetch
from tridock.ops.runs.registry import Run, choose_run
from tridock.ops.runs.reproduce import Gate, Tell, compare
from tridock.reproduction.original import read_original
from tridock.reproduction.outcome import Outcome


def original_of(session: Session, run_id: str | None, home: Path) -> Path:
    """Returns the folder of the named run, freshly fetched from the cluster.

    If no node knows the run or none is up, uses the copy below ``home`` from an earlier fetch.
    """
    try:
        return fetch(session, choose_run(session, run_id, active=False), home)
    except TridockError:
        if run_id is None or not (home / run_id).is_dir():
            raise
        return home / run_id


def start(session: Session, run: Path, tell: Tell, *, force: bool = False) -> tuple[RunBundle, Gate]:
    """Starts the run again. First raises :class:`RequestError` if the data differs or the cluster does not fit."""
    if is_command(run / EXPERIMENT):
        gate = Gate(read_original(run, losses=False), tell, force)
        again = command.prepare_again(session, run)
        return command.launch(session, again, approve=gate.pass_through), gate
    gate = Gate(read_original(run), tell, force)
    prepared = launch_.prepare_on(session, gate.original.experiment, force=force)
    prepared = launch_.on_hosts_gpus(session, prepared)
    return launch_.launch(session, prepared, approve=gate.pass_through), gate


def finish(session: Session, run: Run, gate: Gate, home: Path, tolerance: float | None) -> Outcome:
    """Fetches the new run and compares it; saves the outcome in its folder, here and on the head."""
    folder = fetch(session, run, home)
    outcome = compare(gate.original, folder, gate.differing, tolerance)
    outcome.write(folder)
    there = f"{session.workspace(run.head)}/runs/{run.run_id}"
    session.hosts[run.head].put_tree({REPRODUCTION: outcome.to_json().encode()}, there)
    return outcome
