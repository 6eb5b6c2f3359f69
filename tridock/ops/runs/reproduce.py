"""A run done once more on this machine, from its own folder, and compared with what it was. Needs no host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tridock.contracts.records import check_run, read_object, read_plan
from tridock.contracts.run_folder import EXPERIMENT, MANIFEST
from tridock.differences import Difference
from tridock.errors import Problem, RequestError
from tridock.experiment import is_command, load_experiment
from tridock.ops.runs.local_run import run_here
from tridock.reproduction.original import Original, data_problems, environment, knows_data, read_original
from tridock.reproduction.outcome import Outcome, judge

Tell = Callable[[Sequence[Difference], Sequence[str]], None]
"""Called before the run starts, with what differs in the environment and what weakens the comparison."""


@dataclass(slots=True)
class Gate:
    """Looks at what a new run will be made of, before it starts."""

    original: Original
    tell: Tell
    force: bool
    differing: list[Difference] = field(default_factory=list)

    def pass_through(self, manifest: Mapping[str, object], plan: Mapping[str, object]) -> None:
        """Tells what differs. Raises :class:`RequestError` where the data does, unless forced."""
        self.differing = environment(self.original, manifest, plan)
        self.tell(self.differing, notes(self.original))
        problems = list(data_problems(self.original, manifest))
        if problems and not self.force:
            raise RequestError(problems)


def reproduce_here(
    run: Path, workspace: Path, tell: Tell, *, tolerance: float | None = None, force: bool = False
) -> tuple[Outcome | None, int]:
    """Runs it again on as many ranks of this machine; returns the comparison and the exit code of the new run.

    No comparison where the new run failed: it has printed why. The outcome is left in the new run's folder.
    """
    check_tolerance(tolerance)
    check_run(run)
    if is_command(run / EXPERIMENT):
        what, todo = "is a run of your own program, which needs a cluster", "name the cluster: --hosts"
        raise RequestError(Problem(str(run), what, "", todo))
    original = read_original(run)
    gate = Gate(original, tell, force)
    ended = run_here(
        original.experiment,
        original.world_size,
        workspace,
        force=force,
        approve=gate.pass_through,
    )
    if ended.exit_code:
        return None, ended.exit_code
    outcome = compare(original, ended.folder, gate.differing, tolerance)
    outcome.write(ended.folder)
    return outcome, 0


def compare_with(run: Path, other: Path, tell: Tell, tolerance: float | None = None) -> Outcome:
    """Compares two runs that there are; starts none, and leaves the outcome in the folder of the second."""
    check_tolerance(tolerance)
    original, again = read_original(run), read_original(other)
    differing = environment(original, read_object(again.folder / MANIFEST), read_plan(again.folder))
    tell(differing, notes(original))
    outcome = compare(original, other, differing, tolerance)
    outcome.write(other)
    return outcome


def compare(original: Original, folder: Path, differing: Sequence[Difference], tolerance: float | None) -> Outcome:
    """The new run in ``folder`` beside the original."""
    # The precision of the user's own program is not known.
    precision = "bf16" if is_command(original.experiment) else load_experiment(original.experiment).precision
    return judge(original, folder, differing, precision, tolerance)


def check_tolerance(tolerance: float | None) -> None:
    """Raises :class:`RequestError` for one that is no distance."""
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        todo = "give a number of 0 or more, as 1e-4"
        raise RequestError(Problem("--tolerance", "is not a tolerance", str(tolerance), todo))


def notes(original: Original) -> list[str]:
    """What makes the comparison weaker than it looks."""
    found = []
    if not knows_data(original):
        found.append("the run's manifest does not say what its data was: whether it is the same is not known")
    if original.manifest.get("git_dirty"):
        found.append("the run's code had changes that its commit does not hold")
    if original.moved:
        found.append("the run moved to other nodes: its first losses are from another layout")
    return found
