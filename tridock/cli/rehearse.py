"""``tridock rehearse``."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.cli.options import Arguments, Commands, add_command
from tridock.cli.output import all_to_stderr, print_json, say
from tridock.cli.plan import add_hardware, calibrated, print_program, slots_named, unused_slots
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError, count

if TYPE_CHECKING:
    from tridock.cluster.settings import Cluster
    from tridock.experiment import Experiment
    from tridock.ops.runs.rehearsal import Lost, Reasons

_REPORT: Final = "rehearsal.txt"
_CORPUS_BYTES: Final = 1_000_000
_TOKENS: Final = 4096
_FILES: Final = tuple(
    f"data.{name}"
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "vocab_file", "merge_file")
)
_ELSEWHERE: Final = {
    "GPUs, NCCL, network": "the ranks compute on this machine's CPUs, over Gloo",
    "SSH, image, nodes": "the ranks start here; tridock launch --hosts hostfiles/twin has all of them without a GPU",
}


def add(commands: Commands) -> None:
    examples = (
        "--config configs/jean-zay/30b.yaml --nodes 16 --gpus-per-node 4 --gpu v100-32gb",
        "--config configs/demo-3d.yaml --hosts hostfile --set precision=bf16",
    )
    summary = "try an experiment with small sizes on this machine's CPUs"
    parser = add_command(commands, "rehearse", _rehearse, summary, *examples)
    parser.add_config()
    add_hardware(parser)
    parser.add_set()
    parser.add_flag("--force", "rehearse even if the plan does not fit in GPU memory")
    parser.add_flag("--json", "print what was rehearsed, and what was not, as JSON")


@dataclass(frozen=True, slots=True)
class _Rehearsal:
    """A rehearsal in progress: what is rehearsed, for which slots, and the lines that it has printed."""

    arguments: Arguments
    config: Path
    cluster: Cluster | None
    slots: Mapping[str, Sequence[int]] | None
    scratch: Path
    lines: list[str] = field(default_factory=list)
    document: dict[str, object] = field(default_factory=dict)
    """The same as a JSON object."""

    def say(self, what: str, text: str, **figures: object) -> None:
        """Prints a line; ``figures`` are what it tells in the JSON object, by default its text."""
        self.document[what.replace(" ", "_")] = figures or text
        self.lines.append(f"{what:<12}{text}")
        say(self.lines[-1])

    def list(self, title: str, items: Mapping[str, str]) -> None:
        self.document[title.replace(" ", "_")] = dict(items)
        width = 2 + max(map(len, items), default=0)
        for line in ("", f"{title}:", *(f"  {name:<{width}}{text}" for name, text in items.items())):
            self.lines.append(line)
            say(line)


def _rehearse(arguments: Arguments) -> int:
    """Try an experiment before you pay for GPUs: the same engine, strategy, layout, precision, data, tokenizer,
    trackers and command, with small sizes on this machine's CPUs. The run saves, loses a rank, resumes with equal
    losses, is exported and sampled. Prints what was rehearsed, what was not and why, and the plan of the real sizes."""
    began = time.monotonic()
    with all_to_stderr(when=arguments.json):
        rehearsal, run = _rehearsed(arguments)
        rehearsal.list("left on disk", {str(run): f"the run, with these lines in {_REPORT}"})
        seconds = time.monotonic() - began
        rehearsal.say("rehearsed", f"in {seconds:.0f} s", seconds=seconds)
    write_atomic(run / _REPORT, ("\n".join(rehearsal.lines) + "\n").encode())
    if arguments.json:
        print_json(**rehearsal.document)
    return 0


def _rehearsed(arguments: Arguments) -> tuple[_Rehearsal, Path]:
    """Rehearses the experiment; returns what came of it, and the folder of the run that is left."""
    from tridock.experiment import is_command

    config = arguments.required_config
    has_slots = arguments.nodes is not None or arguments.found_hostfile is not None
    RequestError.raise_for(unused_slots(arguments, has_hostfile=arguments.nodes is None and has_slots))
    os.environ["DS_ACCELERATOR"] = "cpu"  # of this process, and so of the ranks
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes what it has written, as Ctrl-C does
    try:
        with tempfile.TemporaryDirectory(prefix="tridock-rehearsal-") as scratch:
            cluster, slots = slots_named(arguments) if has_slots else (None, None)
            rehearsal = _Rehearsal(arguments, config, cluster, slots, Path(scratch))
            return rehearsal, (_program if is_command(config) else _experiment)(rehearsal)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _experiment(rehearsal: _Rehearsal) -> Path:
    from tridock.contracts.records import read_metrics, read_plan
    from tridock.experiment import dump_experiment, load_experiment
    from tridock.ops.runs.preflight import known_problems
    from tridock.ops.runs.prepare import assumptions_for
    from tridock.ops.runs.rehearsal import ranks_that_fit, refuse_too_many, rehearse_experiment, use_weights
    from tridock.ops.runs.trackers import with_cluster_trackers
    from tridock.plan import assess
    from tridock.plan.shrunk import assumed_slots, shrink
    from tridock.report.plan_output import headline

    arguments, config, cluster = rehearsal.arguments, rehearsal.config, rehearsal.cluster
    real = load_experiment(config, arguments.set)
    slots = rehearsal.slots or assumed_slots(real)
    assumptions = calibrated(assumptions_for(cluster, arguments.gpu, arguments.network_gbit), cluster)
    assessment = assess(real, slots, str(config), assumptions)
    plan = assessment.checked(force=arguments.force)
    if problems := known_problems(config, arguments.set, slots, assumptions):
        raise RequestError([replace(problem, where=f"{config}: {problem.where}") for problem in problems])
    if cluster is not None:
        real = with_cluster_trackers(real, cluster.settings)
    small = shrink(real, plan.data_parallel_size, ranks_that_fit())
    refuse_too_many(small.ranks)
    assumed = "" if rehearsal.slots else f"; {count(plan.world_size, 'slot')} are assumed: give --hosts or --nodes"
    rehearsal.say("real sizes", f"{headline(assessment).plain}{assumed}")
    experiment, reasons = _with_data_here(config, small.experiment, rehearsal.scratch / "data")
    path = rehearsal.scratch / config.name
    path.write_text(dump_experiment(experiment))
    lost = rehearse_experiment(path, small.ranks, Path())
    losses = [it["loss"] for it in read_metrics(lost.folder)[0]]
    ranks = f"{read_plan(lost.folder)['layout']} on {count(small.ranks, 'rank')}"
    text = f"{ranks}, {len(losses)} iterations, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    rehearsal.say("trained", text, run=str(lost.folder), ranks=small.ranks, losses=losses)
    _say_lost(rehearsal, lost)
    kept = {path: value for path, value in small.kept.items() if not (reasons and path in _FILES)}
    reasons |= small.omitted | use_weights(
        lost.folder, real, path, small.ranks, Path(), rehearsal.scratch, rehearsal.say
    )
    rehearsal.list("kept", kept)
    rehearsal.list("shrunk", {it.field: " to ".join(it.values) for it in small.changes})
    rehearsal.list("not rehearsed", _ELSEWHERE | reasons)
    return lost.folder


def _with_data_here(config: Path, experiment: Experiment, folder: Path) -> tuple[Experiment, Reasons]:
    """Returns the experiment with its data in ``folder``, and why they are not its own if they are not here."""
    from tridock.data.corpus import prepare_demo
    from tridock.ops.runs.rehearsal import has_data, with_data, with_linked_data

    data, here = experiment.data, Path()
    if has_data(experiment, here):
        return with_linked_data(experiment, here, folder), {}
    if experiment.model.is_vision:
        todo = "copy them here, or make them: docs/torch.md"
        raise RequestError(Problem(f"{config}: data.data_path", "is not on this machine", data.prefix, todo))
    tokens = min(_TOKENS, experiment.model.vocab_size or _TOKENS)
    made = prepare_demo(folder, tokens, lambda _: None, _CORPUS_BYTES)
    files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    given = {name: str(made.tokenizer / file) for name, file in files.items() if getattr(data, name)}
    why = f"{', '.join(data.prefixes)} is not on this machine: demo data of {count(made.vocab_size, 'token')} were used"
    return with_data(experiment, data_path=str(made.prefix), **given), {"data, tokenizer": why}


def _say_lost(rehearsal: _Rehearsal, lost: Lost) -> None:
    again, repeated = f"restarted from iteration {lost.restarted_from}", list(lost.repeated)
    figures = {"rank": lost.rank, "after": lost.after, "restarted_from": lost.restarted_from}
    rehearsal.say("lost", f"rank {lost.rank}, killed after iteration {lost.after}; {again}", **figures)
    if repeated:
        same = "equal to the last bit" if not lost.differing else f"other losses at {lost.differing}"
        text = f"iterations {repeated[0]} to {repeated[-1]}, {same}"
        rehearsal.say("repeated", text, iterations=repeated, differing=lost.differing)


def _program(rehearsal: _Rehearsal) -> Path:
    from tridock.experiment import load_command
    from tridock.ops.runs.rehearsal import rehearse_program
    from tridock.ops.runs.trackers import with_cluster_trackers

    program = load_command(rehearsal.config, rehearsal.arguments.set)
    ranks = 2
    if (slots := rehearsal.slots) is not None:
        print_program(program, slots)
        ranks = min(ranks, sum(map(len, slots.values())))
    if rehearsal.cluster is not None:
        program = with_cluster_trackers(program, rehearsal.cluster.settings)
    lost = rehearse_program(program, rehearsal.config.parent, ranks, Path())
    rehearsal.say("ran", f"{' '.join(program.command)} on {count(ranks, 'rank')}, in a copy of its code")
    _say_lost(rehearsal, lost)
    reasons = {"sizes": "they are the program's own: give it small ones, as in --set 'command=[…]'"}
    if program.metrics is None:
        reasons["equal losses"] = "the program's losses are unknown: set metrics"
    elif not lost.repeated:
        reasons["equal losses"] = "the program repeated no iteration that it had printed before"
    reasons["checkpoints, export"] = "they are the program's own"
    rehearsal.list("not rehearsed", _ELSEWHERE | reasons)
    return lost.folder
