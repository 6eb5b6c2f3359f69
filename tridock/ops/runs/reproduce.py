"""Repeats a run on this machine from its own folder, and compares both. Needs no host."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tridock.contracts.records import check_run, read_object, read_plan
from tridock.contracts.run_folder import EXPERIMENT, MANIFEST
from tridock.differences import Difference
from tridock.errors import Problem, RequestError
from tridock.experiment import is_command, recorded_run
from tridock.ops.runs.local_run import run_here
from tridock.ops.runs.recorded_run import Confirm, confirm_run
from tridock.reproduction.original import Original, data_problems, environment, knows_data, read_original
from tridock.reproduction.outcome import Outcome, judge

Tell = Callable[[Sequence[Difference], Sequence[str]], None]
"""Called before the run starts, with the differences of the environment and the caveats of the comparison."""


@dataclass(slots=True)
class Gate:
    """Checks the inputs of a new run before it starts."""

    original: Original
    tell: Tell
    force: bool
    differing: list[Difference] = field(default_factory=list)

    def pass_through(self, manifest: Mapping[str, object], plan: Mapping[str, object]) -> None:
        """Reports differences. Raises :class:`RequestError` if the data differs, unless forced."""
        self.differing = environment(self.original, manifest, plan)
        self.tell(self.differing, notes(self.original))
        problems = list(data_problems(self.original, manifest))
        if problems and not self.force:
            raise RequestError(problems)


def reproduce_here(
    run: Path, workspace: Path, tell: Tell, confirm: Confirm, *, tolerance: float | None = None, force: bool = False
) -> tuple[Outcome | None, int]:
    """Repeats the run on as many ranks of this machine; returns the comparison and the new run's exit code.

    If the new run failed, the comparison is None; the run has printed the reason. The outcome is saved in the new run's
    folder. ``confirm`` is asked what the folder would execute or set.
    """
    check_tolerance(tolerance)
    check_run(run)
    if is_command(run / EXPERIMENT):
        what, todo = "is a run of your own program, which needs a cluster", "name the cluster: --hosts"
        raise RequestError(Problem(str(run), what, "", todo))
    original = read_original(run)
    many = (original.world_size or 0) > (os.cpu_count() or 1)
    confirm_run(run, confirm, more=[f"start {original.world_size} ranks on this machine"] * many)
    gate = Gate(original, tell, force)
    ended = run_here(original.experiment, original.world_size, workspace, force=force, approve=gate.pass_through)
    if ended.exit_code:
        return None, ended.exit_code
    outcome = compare(original, ended.folder, gate.differing, tolerance)
    outcome.write(ended.folder)
    return outcome, 0


def compare_with(run: Path, other: Path, tell: Tell, tolerance: float | None = None) -> Outcome:
    """Compares two existing runs, and saves the outcome in the folder of the second."""
    check_tolerance(tolerance)
    original, again = read_original(run), read_original(other)
    differing = environment(original, read_object(again.folder / MANIFEST), read_plan(again.folder))
    tell(differing, notes(original))
    outcome = compare(original, other, differing, tolerance)
    outcome.write(other)
    return outcome


def compare(original: Original, folder: Path, differing: Sequence[Difference], tolerance: float | None) -> Outcome:
    """Compares the new run in ``folder`` with the original."""
    # The precision of your own program is unknown.
    precision = getattr(recorded_run(original.folder), "precision", "bf16")
    return judge(original, folder, differing, precision, tolerance)


def check_tolerance(tolerance: float | None) -> None:
    """Raises :class:`RequestError` if the tolerance is not a valid distance."""
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        todo = "give a number of 0 or more, as 1e-4"
        raise RequestError(Problem("--tolerance", "is not a tolerance", str(tolerance), todo))


def notes(original: Original) -> list[str]:
    """Returns the caveats of the comparison."""
    found = []
    if not knows_data(original):
        found.append("the run's manifest does not say what its data was: whether it is the same is not known")
    if original.manifest.get("git_dirty"):
        found.append("the run's code had changes that its commit does not hold")
    if original.moved:
        found.append("the run moved to other nodes: its first losses are from another layout")
    return found
