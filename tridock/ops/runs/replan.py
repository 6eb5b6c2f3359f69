"""Lays out a run that has lost nodes again, on spares or fewer nodes. Reads the run's folder, writes nothing."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tridock.contracts import run_folder
from tridock.contracts.records import read_object, read_plan, slots_of
from tridock.contracts.supervision import NewLayout, Supervision
from tridock.engines import program_of
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, recorded_experiment
from tridock.gpus import find_gpu
from tridock.launchers import LAUNCHERS
from tridock.launchers.run import RunBundle, make_bundle
from tridock.ops.runs.prepare import prepared_from
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.node_loss import continuing_layout

Slots = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Replanned:
    """The continuing run, and a summary of the changes."""

    bundle: RunBundle
    assessment: Assessment
    summary: str

    def new_layout(self) -> NewLayout:
        """Returns it for the run's supervisor, which sends the files to the nodes."""
        files = {name: content.decode() for name, content in self.bundle.files.items()}
        plan = self.assessment.laid_out
        nodes = tuple(slots_of(plan.document()))
        return NewLayout(self.summary, str(plan.layout), plan.world_size, nodes, files)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as its folder records it."""

    folder: Path
    experiment: Experiment
    plan: Mapping[str, Any]
    manifest: Mapping[str, Any]
    supervision: Supervision

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a run's folder. Raises :class:`RequestError` if it is none."""
        try:
            texts = {name: (folder / name).read_text(errors="replace") for name in _READ}
        except OSError as error:
            what, todo = f"has no {Path(error.filename).name}", "give the folder of a run that tridock launch started"
            raise RequestError(Problem.of_error(folder, what, error, todo)) from None
        name = run_folder.SUPERVISION
        with RequestError.in_place_of((ValueError, RecursionError), folder / name, "is damaged", _DAMAGED):
            supervision = Supervision.from_json(texts[name])
            if supervision.launcher not in LAUNCHERS:
                raise ValueError(f"no launcher is named {supervision.launcher!r}")
        plan, manifest = read_plan(folder), read_object(folder / run_folder.MANIFEST)
        for name, content in ((run_folder.MANIFEST, manifest), (run_folder.PLAN, plan)):
            if not content:
                raise RequestError(Problem(str(folder / name), "is damaged", "", _DAMAGED))
        if supervision.scheduler is not None:
            todo = "let it replace the node: the job is queued again"
            raise RequestError(Problem(str(folder), "is a run under a scheduler", supervision.scheduler, todo))
        return cls(folder.resolve(), recorded_experiment(folder), plan, manifest, supervision)

    @property
    def assumptions(self) -> Assumptions:
        gpu = self.plan["memory"]["gpu"]
        return Assumptions(gpu=None if gpu is None else find_gpu(gpu, "plan.json: memory.gpu"))

    @property
    def force(self) -> bool:
        """Whether it was started with a plan that did not fit."""
        return self.plan.get("verdict") == "no-fit"


_DAMAGED = "take it from another node of the run"
_READ = (run_folder.EXPERIMENT, run_folder.PLAN, run_folder.MANIFEST, run_folder.SUPERVISION)


def replan(
    folder: Path, lost: Sequence[str], ready: Sequence[str] = (), *, from_scratch: bool = False, head: str | None = None
) -> Replanned:
    """Returns the run without the ``lost`` nodes; ``ready`` are the available spares.

    ``from_scratch``: there is no checkpoint to continue from. ``head``: the node that leads the run from now on. Raises
    :class:`RequestError` with the reasons and a layout that would run.
    """
    run = RecordedRun.read(folder)
    before = slots_of(run.plan)
    head = head or run.supervision.head
    _check_names(run, before, lost, ready, head)
    after, places = _with_spares(run.supervision, before, lost, ready)
    after = {head: after[head], **after}
    if len(after) == len(before):
        assessment = assess(run.experiment, after, run.folder.name, run.assumptions)
    else:
        assessment = _with_fewer(run, after, lost, from_scratch)
    summary = "; ".join(_changes(run, before, assessment, places, lost, head))
    return Replanned(_bundle(run, assessment, head), assessment, summary)


def _check_names(run: RecordedRun, before: Slots, lost: Sequence[str], ready: Sequence[str], head: str) -> None:
    problems = [
        Problem("--without", "is not a node of the run", repr(node), f"use one of {', '.join(before)}")
        for node in lost
        if node not in before
    ]
    problems += [
        Problem("--spare", "is not a spare of the run", repr(node), f"its spares are {_named(run.supervision.spares)}")
        for node in ready
        if node not in run.supervision.spares
    ]
    if head not in before:
        problems.append(Problem("--head", "is not a node of the run", repr(head), f"use one of {', '.join(before)}"))
    if head in lost:
        todo = f"continue it on the other nodes with tridock resume --exclude {shlex.quote(head)}"
        problems.append(Problem("--without", "is the run's head, without which it cannot continue", head, todo))
    RequestError.raise_for(problems)


def _with_spares(
    supervision: Supervision, before: Slots, lost: Sequence[str], ready: Sequence[str]
) -> tuple[Slots, dict[str, str]]:
    """Returns the new nodes, with a spare of as many slots for each lost one, and the replacements."""
    free = {node: supervision.spares[node] for node in ready}
    after: Slots = {}
    places: dict[str, str] = {}
    for node, numbers in before.items():
        if node not in lost:
            after[node] = numbers
        elif spare := next((name for name, own in free.items() if len(own) >= len(numbers)), None):
            after[spare] = free.pop(spare)[: len(numbers)]
            places[node] = spare
    return after, places


def _with_fewer(run: RecordedRun, after: Slots, lost: Sequence[str], from_scratch: bool) -> Assessment:
    """Returns the layout on the remaining nodes. Raises :class:`RequestError`."""
    experiment, where = run.experiment, run.folder.name
    found = continuing_layout(experiment, after, where, run.assumptions, force=run.force)
    slots = sum(map(len, after.values()))
    here = f"{slots} slot{'s' * (slots != 1)} on {_named(after)}"
    if found is None:
        what = f"has no layout with a global batch of {experiment.batch.global_batch_size} on the remaining nodes"
        todo = f"bring {', '.join(lost)} back, and continue with tridock resume"
        raise RequestError(Problem(where, what, here, todo))
    nodes, fewest = slots_of(found.laid_out.document()), run.supervision.min_nodes
    if len(nodes) < fewest:
        what, todo = f"may not continue with fewer than {fewest} nodes", "lower restart.min_nodes, or add spares"
        raise RequestError(Problem(where, what, _named(nodes), todo))
    if program_of(experiment).checkpoints_load_on == "same layout" and not from_scratch:
        what = f"Megatron v1.1.5 loads its checkpoint on {run.plan['layout']} and no other layout"
        todo = f"bring {', '.join(lost)} back; from its beginning it would run as {found.laid_out.layout}"
        raise RequestError(Problem(where, what, here, f"{todo} on {_named(nodes)}"))
    return found


def _bundle(run: RecordedRun, assessment: Assessment, head: str) -> RunBundle:
    slots, supervision = slots_of(assessment.laid_out.document()), run.supervision
    again = replace(
        prepared_from(assessment, slots, run.folder.name),
        master_port=supervision.master_port,
        manifest=run.manifest,
        master_addr=supervision.addresses.get(head, supervision.master_addr),
        addresses=supervision.addresses,
        devices=supervision.devices,
        queued=supervision.queued,
        workspace=str(run.folder.parent.parent),
        spares={node: numbers for node, numbers in supervision.spares.items() if node not in slots},
    )
    return make_bundle(again, LAUNCHERS[supervision.launcher]())


def _changes(
    run: RecordedRun, before: Slots, assessment: Assessment, places: Mapping[str, str], lost: Sequence[str], head: str
) -> Iterator[str]:
    if head != run.supervision.head:
        yield f"{head} leads it in the place of {run.supervision.head}"
    for node, spare in places.items():
        yield f"{spare} takes the place of {node}"
    if gone := [node for node in before if node in lost and node not in places]:
        plan = assessment.laid_out
        nodes = _named(slots_of(plan.document()))
        yield f"without {', '.join(gone)} it continues as {plan.layout} (it was {run.plan['layout']}) on {nodes}"
        yield f"global batch {plan.global_batch_size} as before, in {plan.accumulation_steps} micro-batches a replica"


def _named(nodes: Mapping[str, object]) -> str:
    return ", ".join(nodes) or "none"
