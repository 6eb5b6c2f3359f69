"""A run on this machine: in a container (`docker compose run trainer …`) or in a virtual environment, without ssh.

Several machines can also join one run without ssh, each started by hand with its rank (``NODE_RANK``).
"""

import hashlib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from tridock.contracts import environment, run_folder
from tridock.contracts.node_answers import Evidence
from tridock.contracts.records import check_run
from tridock.contracts.run_state import exit_code_of
from tridock.contracts.supervision import Supervision
from tridock.contracts.trackers import wait_for_delivery
from tridock.errors import EXIT_INTERRUPTED, Problem, RequestError
from tridock.experiment import CommandExperiment, dump_experiment
from tridock.launchers.local import Local
from tridock.launchers.run import RunBundle, make_bundle
from tridock.ops.runs import rendezvous
from tridock.ops.runs.code import place_code, read_code
from tridock.ops.runs.prepare import Planned, prepare
from tridock.ops.runs.prepared import prepare_command
from tridock.ops.runs.provenance import Approve, image_manifest, machine, packages, provenance
from tridock.ops.runs.this_machine import (
    CODE_FOLDER,
    ask_here,
    default_ranks,
    free_port,
    gpu_count,
    gpu_here,
    hidden_gpus,
    node_argv,
    node_environment,
)
from tridock.ops.runs.trackers import RunTrackers, check_here, trackers_of
from tridock.ops.runs.triage import RunFailedError, failure_text, rank_to_look_at
from tridock.plan import Assumptions, Plan
from tridock.triage import facts_of

HERE = "localhost"
_DELIVERY_S = 60.0
"""Seconds for the trackers, which end with this machine's container or job."""
_RENDEZVOUS_PORT = 29500
_GRACE_S = 10.0
_FIRST_RANK_S = 120
"""Seconds: a signal may arrive before the ranks start."""
# The signals that announce the end of a job's time.
_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Place:
    """This machine's place in the run: ``nnodes`` machines, its rank, and the address of the first."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None

    def slots(self, ranks: int) -> dict[str, range]:
        """Returns the slots of a run with ``ranks`` ranks on each machine."""
        names = [HERE] if self.nnodes == 1 else [f"node-{rank}" for rank in range(self.nnodes)]
        return {name: range(ranks) for name in names}

    def check(self) -> None:
        """Raises :class:`RequestError` with every inconsistency."""
        problems = []
        if self.nnodes < 1:
            problems.append(Problem("--nnodes", "must be at least 1", str(self.nnodes), "give the number of nodes"))
        elif not 0 <= self.node_rank < self.nnodes:
            todo = f"use 0 to {self.nnodes - 1}"
            problems.append(Problem("--node-rank", f"is not one of {self.nnodes} nodes", str(self.node_rank), todo))
        if self.nnodes > 1 and self.master_addr is None:
            todo = "give the address of the node of rank 0, as the others reach it"
            problems.append(Problem("--master-addr", f"is needed for {self.nnodes} nodes", "nothing", todo))
        RequestError.raise_for(problems)


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended: its folder and its exit code."""

    folder: Path
    exit_code: int


def run_here(
    config: Path,
    nproc: int | None,
    workspace: Path,
    overrides: Sequence[str] = (),
    run_id_file: Path | None = None,
    place: Place = Place(),
    *,
    force: bool = False,
    quiet: bool = False,
    approve: Approve | None = None,
) -> Ended:
    """Runs the experiment as this machine's ranks and follows it to the end; ``quiet`` prints only the run's folder.

    Ctrl-C stops the run, which belongs to this terminal, unlike one of ``tridock launch``. ``approve`` is called with
    the run's manifest and plan before anything is written, and may raise.
    """
    workspace = workspace.resolve()
    if not workspace.is_dir():
        todo = "give the folder that holds data/"
        raise RequestError(Problem("--workspace", "is not a folder", str(workspace), todo))
    place.check()
    ranks = ranks_here(nproc)
    prepared = prepare(config, place.slots(ranks), Assumptions(gpu=gpu_here()), overrides, force=force)
    experiment = prepared.experiment
    if experiment.env.get("DS_ACCELERATOR") != "cpu" and (gpus := gpu_count()) is not None and ranks > gpus:
        todo = f"this machine has {gpus}: give as many or fewer, or train on the CPU with DS_ACCELERATOR=cpu"
        raise RequestError(Problem("--nproc", "each rank needs its own GPU", str(ranks), todo))
    if experiment.env.get("DS_ACCELERATOR") != "cpu" and (hidden := hidden_gpus()):
        print(
            f"note: this machine has {hidden} NVIDIA GPUs, and nvidia-smi does not answer here: training on the CPU."
            " In a container: docker run --gpus all, or tridock image for docker compose",
            file=sys.stderr,
        )
    if place.nnodes > 1 and experiment.restart.max:
        what = "cannot be for nodes that are each started by hand"
        todo = "set it to 0, or start them with tridock launch"
        raise RequestError(Problem(f"{config}: restart.max", what, str(experiment.restart.max), todo))
    trackers = trackers_of(experiment) if place.node_rank == 0 else RunTrackers()
    check_here(trackers)
    prepared = prepared.with_files_of(workspace)
    alone = place.nnodes == 1
    port = prepared.port if alone else experiment.launch.master_port or _RENDEZVOUS_PORT
    if not alone:
        prepared = replace(prepared, run_id=_agree(place, port, ranks, prepared))
    run_id = prepared.run_id
    run = replace(
        prepared,
        master_port=port,
        manifest=_manifest(prepared, ranks),
        master_addr=place.master_addr or "127.0.0.1",
        workspace=str(workspace),
    )
    bundle = make_bundle(run, Local(place.node_rank))
    if approve is not None:
        approve(*(json.loads(bundle.files[name]) for name in (run_folder.MANIFEST, run_folder.PLAN)))
    folder = workspace / "runs" / run_id
    _write(folder, bundle, place)
    if run_id_file is not None:
        run_folder.write_atomic(run_id_file, f"{run_id}\n".encode())
    if quiet:
        print(folder)
    else:
        _announce(folder, prepared.plan, place)
    if place.node_rank:
        return Ended(folder, _join(folder, ranks, place.node_rank))
    code = start_and_follow(folder, ranks, quiet=quiet, secrets=trackers.secrets)
    if code == run_folder.EXIT_PREEMPTED:
        print(f"continue it with tridock resume runs/{folder.name}")
    return Ended(folder, code)


def run_program_here(
    experiment: CommandExperiment, source: Path, ranks: int, workspace: Path, approve: Approve
) -> Ended:
    """Runs your own program as this machine's ranks, with its code copied from ``source``, to its end; prints nothing
    of its output. ``approve``: as of :func:`run_here`."""
    workspace = workspace.resolve()
    trackers = trackers_of(experiment)
    check_here(trackers)
    launcher, code = Local(library=str(CODE_FOLDER)), read_code(source / experiment.code)
    prepared = prepare_command(experiment, code, {HERE: range(ranks)}, launcher)
    manifest = {**provenance(CODE_FOLDER), **prepared.manifest}
    bundle = make_bundle(
        replace(prepared, master_port=free_port(), manifest=manifest, workspace=str(workspace)), launcher
    )
    approve(*(json.loads(bundle.files[name]) for name in (run_folder.MANIFEST, run_folder.PLAN)))
    folder = workspace / "runs" / bundle.run_id
    _write(folder, bundle, Place())
    place_code(code, folder)
    return Ended(folder, start_and_follow(folder, ranks, quiet=True, secrets=trackers.secrets))


def ranks_here(nproc: int | None) -> int:
    """Returns the number of ranks on this machine: ``nproc``, or one per GPU."""
    if nproc is not None and nproc < 1:
        raise RequestError(Problem("--nproc", "must be at least 1", str(nproc), "give the number of ranks"))
    return nproc or default_ranks()


def _agree(place: Place, port: int, ranks: int, prepared: Planned) -> str:
    """Returns the run's id once every node has joined with the same terms."""
    digest = hashlib.sha256(dump_experiment(prepared.experiment).encode()).hexdigest()
    terms = rendezvous.Terms(place.node_rank, place.nnodes, ranks, digest)
    if place.node_rank == 0:
        rendezvous.lead(port, terms, prepared.run_id, print)
        return prepared.run_id
    assert place.master_addr is not None
    return rendezvous.follow(place.master_addr, port, terms, print)


def _write(folder: Path, bundle: RunBundle, place: Place) -> None:
    for name, content in bundle.files.items():
        # Nodes may share the folder: node 0's files are the run's.
        if place.node_rank == 0 or not (folder / name).exists():
            run_folder.write_atomic(folder / name, content)


def _announce(folder: Path, plan: Plan, place: Place) -> None:
    where = "on this machine" if place.nnodes == 1 else f"on {place.nnodes} nodes, this one is {place.node_rank}"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    print(f"run {folder.name}: {ranks} {where}, {plan.layout}; folder {folder}")


def start_and_follow(
    folder: Path,
    ranks: int,
    *,
    again: bool = False,
    patience_s: float = 0.0,
    quiet: bool = False,
    secrets: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Starts the run and prints its output, unless ``quiet``; returns its exit code.

    ``again``: resumes the run once its previous supervisor has ended, within ``patience_s`` seconds. ``secrets`` are
    those of its trackers, which this function waits for at the end.
    """
    if not quiet:
        print(Supervision.read(folder).hang_limit)
    env = node_environment(ranks)
    log = folder / run_folder.LAUNCHER_LOG
    offset = log.stat().st_size if again and log.exists() else 0
    options = ["--again", "--patience", str(patience_s)] if again else []
    options += ["--secrets"] if secrets else []
    try:
        # Each in its own session: from here on this process handles Ctrl-C.
        start = [*node_argv(), "start", str(folder), *options]
        given = json.dumps(dict(secrets)).encode()
        if code := subprocess.run(start, input=given, env=env, start_new_session=True, check=False).returncode:
            return code
        with _forwarding_signals(folder, env):
            follow = [*node_argv(), "follow", str(folder), "--offset", str(offset)]
            output = subprocess.DEVNULL if quiet else None
            code = subprocess.run(
                follow, stdout=output, env=env, start_new_session=True, preexec_fn=_ignore_schedulers, check=False
            ).returncode
    except KeyboardInterrupt:
        return _interrupted(folder, env)
    if unsent := wait_for_delivery(folder, _DELIVERY_S):
        print(f"{', '.join(unsent)}: still sending; tridock track {shlex.quote(str(folder))} sends the rest")
    if code not in (0, run_folder.EXIT_STOPPED, run_folder.EXIT_PREEMPTED):
        print(_why(folder, code), file=sys.stderr)
    return code


def triage_here(folder: Path) -> RunFailedError:
    """Returns why the run of a folder (also a fetched one) failed. Raises :class:`RequestError` if it is none."""
    check_run(folder)
    return _why(folder, exit_code_of(folder))


def _why(folder: Path, code: int | None) -> RunFailedError:
    answer = ask_here(Evidence, "evidence", str(folder), where=str(folder))
    ranks = answer.plan.get("ranks") or [{"node": HERE}]
    head = str(ranks[0]["node"])
    facts = facts_of({head: answer}, head, code)
    log = folder / (run_folder.rank_log(rank_to_look_at(facts)) if facts.has_log else run_folder.LAUNCHER_LOG)
    return RunFailedError(Problem(folder.name, "the run failed", failure_text(facts), f"look at {log}"), facts)


def _join(folder: Path, ranks: int, node_rank: int) -> int:
    """Runs this node's ranks of a run that node 0 supervises."""
    env = {**node_environment(ranks), environment.RUN_ID: folder.name}
    script = ["bash", str(folder / run_folder.launch_script(node_rank))]
    # Its own session: this process handles Ctrl-C.
    with subprocess.Popen(script, stdin=subprocess.DEVNULL, env=env, start_new_session=True) as launcher:
        try:
            with _forwarding_signals(folder, env):
                code = launcher.wait()
        except KeyboardInterrupt:
            code = _interrupted(folder, node_environment(ranks))
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_GRACE_S)
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding_signals(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Forwards a scheduler's signal to this node's ranks, which save and end."""

    def forward(number: int, _frame: object) -> None:
        argv = [*node_argv(), "save", str(folder), "--signal", str(number), "--patience", str(_FIRST_RANK_S)]
        subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)

    # Of a caller that such a signal interrupts, as Ctrl-C does, the ranks are stopped instead.
    numbers = [it for it in _SCHEDULERS if signal.getsignal(it) is not signal.default_int_handler]
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_schedulers() -> None:
    """Ignores a scheduler's signals in a process that also receives them but has no part in the job."""
    for number in _SCHEDULERS:
        signal.signal(number, signal.SIG_IGN)


def _interrupted(folder: Path, env: Mapping[str, str]) -> int:
    print(f"\nstopping run {folder.name}")
    stop = ["stop", folder.name, "--workspace", str(folder.parent.parent)]
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave ranks behind
    try:
        subprocess.run([*node_argv(), *stop], env=env, stdout=subprocess.DEVNULL, check=False)
    finally:
        signal.signal(signal.SIGINT, previous)
    return EXIT_INTERRUPTED


def _manifest(prepared: Planned, ranks: int) -> dict[str, object]:
    image = image_manifest()
    return {
        **provenance(CODE_FOLDER),
        **prepared.manifest,
        "python": sys.version.split()[0],
        "image_manifest": image,
        "packages": packages() if image is None else None,
        # The number of threads changes how sums are split, and so their last bits.
        "machine": {**machine(), "threads_per_rank": node_environment(ranks)["OMP_NUM_THREADS"]},
    }
