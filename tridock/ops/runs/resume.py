"""Continues a run that has stopped, failed, lost its head or come to its end, with changes, as a new run."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tridock.cluster.settings import Cluster
from tridock.contracts.events import Event, events_of
from tridock.contracts.records import check_run, slots_of
from tridock.contracts.run_folder import CHECKPOINTS, CODE_COPY, EXPERIMENT, SUPERVISION, read_text
from tridock.contracts.supervision import Supervision
from tridock.differences import flattened
from tridock.engines import program_of
from tridock.engines.fields import as_overrides
from tridock.errors import Problem, RequestError, count
from tridock.experiment import Experiment, is_command, load_experiment, recorded_experiment
from tridock.experiment.training import learning_rate, training_fields
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.cluster_runs import Run, list_runs
from tridock.ops.runs.fetch import newest_copy
from tridock.ops.runs.prepare import assumptions_for
from tridock.ops.runs.recorded_run import Confirm, confirm_run
from tridock.plan import assess
from tridock.plan.node_loss import continuing_layout


@dataclass(frozen=True, slots=True)
class Continuation:
    """What continues a run: its experiment, the overrides, and lines about what they do."""

    config: Path
    overrides: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join((f"continues {self.config.parent.name}", *self.notes))


def folder_on(hosts: Hosts, run_id: str | None, home: Path) -> Path:
    """Returns the folder of a run of the cluster, freshly fetched below ``home``; where no node is up, an earlier copy.

    Raises :class:`RequestError` if it is running.
    """

    def stopped(client: NodeClient, run: Run) -> None:
        if any(it.run_id == run.run_id and it.state.is_active for it in list_runs(client)):
            todo = f"stop it first: tridock stop {client.cluster.hosts_option} --run {run.run_id}"
            raise RequestError(Problem(run.run_id, "is running", "", todo))

    return newest_copy(hosts, run_id, home, stopped)


def continuation(
    run: Path,
    changes: Sequence[str],
    confirm: Confirm,
    request: Mapping[str, object] | None = None,
    newest: Callable[[str], int | None] = lambda _: None,
) -> Continuation:
    """Returns how the run in a folder continues with these ``--set`` changes, once ``confirm`` allows what it sets, and
    what the ``request`` of its job does. ``newest`` tells the iteration of the newest checkpoint in a folder of the
    workspace, None if there is none: where the run's events are gone with its head.

    Raises :class:`RequestError` if there is nothing to continue, or a change leaves the learning rate to guess.
    """
    check_run(run)
    config = run / EXPERIMENT
    if is_command(config):
        todo = "give --hosts: it continues there, in its folder"
        raise RequestError(Problem(str(run), "is a run of your own program on a cluster", "", todo))
    before = recorded_experiment(run)
    if not before.train.save:
        todo = "start it again with tridock launch --config"
        raise RequestError(Problem(str(run), "has saved no checkpoint", "train.save: false", todo))
    confirm_run(run, confirm, request)
    if run.resolve().parent.name != "runs":
        todo = "move it back: a run's checkpoints are found in runs/ of its workspace"
        raise RequestError(Problem(str(run), "is not in a folder runs/", "", todo))
    load = before.train.checkpoint_folder or f"runs/{run.name}/{CHECKPOINTS}"
    overrides = (f"train.load={load}", *changes)
    now = load_experiment(config, overrides)
    # To change a field is to choose it.
    if (chosen := _chosen(before, now, changes)) or before.train.override_checkpoint:
        overrides = (f"train.override_checkpoint=[{', '.join(chosen)}]", *overrides)
    saved = [event.get("iteration") for event in events_of(run, Event.CHECKPOINT_SAVED)]
    at = max((it for it in saved if isinstance(it, int)), default=None)
    if at is None and not any(it.startswith("train.load=") for it in changes):
        at = newest(load)
    RequestError.raise_for([*_iterations(run, now, at), *_schedule(before, now, changes)])
    where = [f"continues from what is in {load}"] if at is None else _position(now, at)
    return Continuation(config, overrides, (*_changed(before, now), *where))


def on_slots(
    cluster: Cluster, found: Continuation, changes: Sequence[str], *, force: bool = False
) -> tuple[Cluster, Continuation]:
    """Returns how a run continues on slots that its layout does not allow, as it would after a node loss: with fewer
    replicas or, where its checkpoints load on any layout, in another one; and the cluster with the slots that it takes.

    Returns both as they are if its layout runs there, if a change names a layout, or if no other one can continue it.
    """
    before, now = recorded_experiment(found.config.parent), load_experiment(found.config, found.overrides)
    is_chosen = any(it.startswith(("parallel=", "parallel.")) for it in changes)
    is_fixed = is_chosen or program_of(before).checkpoints_load_on == "same layout"
    if is_fixed or not all(assess(it, cluster.slots, str(found.config)).problems for it in (before, now)):
        return cluster, found
    other = continuing_layout(now, cluster.slots, str(found.config), assumptions_for(cluster), force=force)
    if other is None:
        return cluster, found
    own, plan = dict(now.parallel), other.laid_out
    fields = {f"parallel.{name}": value for name, value in other.experiment.parallel if own[name] != value}
    slots = slots_of(plan.document())
    of = f"{plan.world_size} of {count(sum(map(len, cluster.slots.values())), 'slot')}"
    note = f"{plan.layout} on {of} ({', '.join(slots)}): the layout that it had needs other slots"
    overrides, notes = (*found.overrides, *as_overrides(fields)), (note, *found.notes)
    return replace(cluster, slots=slots), replace(found, overrides=overrides, notes=notes)


def nodes_of_program(hosts: Hosts, run: Path) -> Supervision:
    """Returns who runs a run of your own program, which continues on the nodes that it had: they have its files.

    Raises :class:`RequestError` if these are not those of the cluster.
    """
    todo = "begin anew: tridock run"
    with RequestError.in_place_of((ValueError, RecursionError), run / SUPERVISION, "is missing or damaged", todo):
        supervision = Supervision.from_json(read_text(run / SUPERVISION))
    if tuple(supervision.ranks) != hosts.nodes:
        config, code = (shlex.quote(str(run / name)) for name in (EXPERIMENT, CODE_COPY))
        todo = f"choose these with --hosts, --include and --nodes; or begin anew: tridock run --config {config}"
        what = f"continues on the nodes that have its files, {', '.join(supervision.ranks)}"
        raise RequestError(Problem(run.name, what, ", ".join(hosts.nodes), f"{todo} --workdir {code}"))
    return supervision


def _iterations(run: Path, now: Experiment, at: int | None) -> Iterator[Problem]:
    if at is not None and now.train.train_iters <= at:
        todo = f"give more: --set train.train_iters={2 * at}"
        yield Problem("train.train_iters", f"{run.name} has come to its end", f"{at} iterations", todo)


def _chosen(before: Experiment, now: Experiment, changes: Sequence[str]) -> list[str]:
    """Returns the fields of the training that the changes name, by themselves or with their section."""
    old, named = training_fields(before), [it.partition("=")[0] for it in changes]
    differing = (name for name, value in training_fields(now).items() if old.get(name) != value)
    return [it for it in differing if any(it == name or it.startswith(f"{name}.") for name in named)]


def _schedule(before: Experiment, now: Experiment, changes: Sequence[str]) -> Iterator[Problem]:
    """Yields that more iterations would stretch the schedule of the learning rate, unless its end is chosen."""
    old, new = (it.optimizer.lr_decay_iters or it.train.train_iters for it in (before, now))
    is_flat = now.optimizer.lr_decay_style == "constant" and now.optimizer.lr_warmup_fraction is None
    if old != new and not is_flat and not any(it.startswith("optimizer.lr_decay_iters=") for it in changes):
        todo = f"choose: --set optimizer.lr_decay_iters={old} keeps it, ={new} stretches it"
        yield Problem("optimizer.lr_decay_iters", f"the learning rate would end at {new}", f"{old} before", todo)


def _changed(before: Experiment, now: Experiment) -> Iterator[str]:
    old, new = (dict(flattened(it.model_dump(mode="json"))) for it in (before, now))
    for name in sorted(old.keys() | new.keys()):
        if name not in ("train.load", "train.override_checkpoint") and old.get(name) != new.get(name):
            yield f"{name}: {new.get(name)} (it was {old.get(name)})"


def _position(now: Experiment, at: int) -> Iterator[str]:
    rate = learning_rate(at + 1, now.optimizer, now.train.train_iters)
    yield f"continues after iteration {at} of {now.train.train_iters} at the latest, with learning rate {rate:.3g}"
    yield "the data continues after the samples that the checkpoint has seen; metrics.jsonl begins there"
