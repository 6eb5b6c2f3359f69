"""Composes the head's command and the first files of a run's folder from a request and a launcher."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.supervision import Reach, Supervision
from tridock.contracts.vote import FEWEST_VOTERS, voters_among
from tridock.engines import RankProgram, checkpoints_folder, rank_program
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, dump_experiment
from tridock.launchers.bundle import RunBundle, Start, hostfile_text
from tridock.launchers.deepspeed import environment_file
from tridock.plan import Assessment
from tridock.sink_settings import contracts


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to run, and where its ranks are placed."""

    experiment: Experiment
    assessment: Assessment
    slots: Mapping[str, Sequence[int]]
    run_id: str
    master_port: int
    manifest: Mapping[str, object]
    master_addr: str = "127.0.0.1"
    workspace: str = run_folder.WORKSPACE
    """The base folder of relative paths, the same on every node."""
    spares: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Nodes that may replace a lost one."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """As in :class:`Supervision`."""
    voters: tuple[str, ...] = ()
    """Those of a run that has already started; empty for a new one."""


class Launcher(Protocol):
    """Starts the ranks of a run."""

    name: ClassVar[str]
    scheduler: ClassVar[str | None]
    """The scheduler that requeues a preempted run or one that lost a node; None if the supervisor restarts it."""
    reach: ClassVar[Reach]
    """How the supervisor runs ``python -m tridock.node`` on another node."""

    def start(self, run: Run) -> Start:
        """Returns the command lines of the run's ranks."""


@dataclass(frozen=True, slots=True)
class Run:
    """A request with its experiment resolved and its folder named, the same on every node."""

    request: RunRequest
    experiment: Experiment
    path: str

    @property
    def checkpoints(self) -> str:
        """The folder of its checkpoints."""
        return checkpoints_folder(self.experiment, self.path)

    def program(self, *, resume: bool = False) -> RankProgram:
        request = self.request
        return rank_program(self.experiment, request.assessment.laid_out, request.run_id, self.path, resume=resume)


def make_bundle(request: RunRequest, launcher: Launcher) -> RunBundle:
    """Composes the head's command and the first files of the run's folder."""
    experiment = request.experiment.resolved(request.assessment.laid_out.data_parallel_size)
    run = Run(request, experiment, f"{request.workspace}/runs/{request.run_id}")
    start = launcher.start(run)
    return RunBundle(request.run_id, run.path, start.command, _files(run, start, _supervision(run, launcher, start)))


def _supervision(run: Run, launcher: Launcher, start: Start) -> Supervision:
    experiment, request = run.experiment, run.request
    ranks: dict[str, list[int]] = {node: [] for node in request.slots}
    for rank in request.assessment.laid_out.ranks:
        ranks[rank.node].append(rank.rank)
    return Supervision(
        head=next(iter(request.slots)),
        ranks={node: tuple(numbers) for node, numbers in ranks.items()},
        remote=start.remote,
        master_port=request.master_port,
        hang_timeout_s=experiment.launch.hang_timeout,
        max_restarts=experiment.restart.max,
        restart_window_s=experiment.restart.window,
        node_timeout_s=experiment.restart.node_timeout,
        min_nodes=experiment.restart.min_nodes,
        checkpoints=run.checkpoints if experiment.train.save else None,
        spares={node: tuple(numbers) for node, numbers in request.spares.items()},
        master_addr=request.master_addr,
        addresses=request.addresses,
        launcher=launcher.name,
        reach=launcher.reach,
        scheduler=launcher.scheduler,
        on_head=start.on_head,
        replication_factor=experiment.restart.replication_factor,
        voters=_voters(request, launcher, start),
        prepared_at=start.prepared_at,
        trackers=tuple(tracker.contract for tracker in experiment.trackers),
        notify=contracts(experiment.notify),
    )


def _voters(request: RunRequest, launcher: Launcher, start: Start) -> tuple[str, ...]:
    """Returns the nodes that vote on who supervises the run, if it has copies for that."""
    factor = request.experiment.restart.replication_factor
    if request.voters or factor == 1 or launcher.scheduler is not None or not start.remote:
        return request.voters
    nodes = (*request.slots, *request.spares)
    if not request.experiment.restart.max:
        what, todo = "above 1 is for runs that restart", "set restart.max, or leave it out"
        raise RequestError(Problem("restart.replication_factor", what, "restart.max: 0", todo))
    if len(nodes) < FEWEST_VOTERS:
        what = f"above 1 needs at least {FEWEST_VOTERS} nodes, of which a majority must outlive the head"
        todo = "add a node or a spare, or leave it out"
        raise RequestError(Problem("restart.replication_factor", what, ", ".join(nodes), todo))
    return voters_among(nodes)


def _files(run: Run, start: Start, supervision: Supervision) -> Mapping[str, bytes]:
    """Returns the folder's first files. A run that saves no checkpoint has no restart script."""
    request, env = run.request, start.env
    ranks = {name: value for name, value in env.items() if name != "DS_ENV_FILE"}
    texts = {
        run_folder.EXPERIMENT: dump_experiment(run.experiment),
        run_folder.PLAN: request.assessment.to_json(),
        run_folder.MANIFEST: json.dumps({**request.manifest, "run_id": request.run_id}, indent=2) + "\n",
        run_folder.HOSTFILE: hostfile_text(request.slots),
        **({run_folder.DEEPSPEED_ENV: environment_file(ranks)} if "DS_ENV_FILE" in env else {}),
        start.script: _launch_script(run, env, start.command),
    }
    saves = run.experiment.train.save
    if saves:
        texts[run_folder.RESUME_SCRIPT] = _launch_script(run, env, start.resume)
    if start.ranks is not None:
        first, again = start.ranks
        texts[run_folder.RANKS_SCRIPT] = _launch_script(run, env, first, who="each node")
        if saves:
            texts[run_folder.RESUME_RANKS_SCRIPT] = _launch_script(run, env, again, who="each node")
    texts[run_folder.SUPERVISION] = supervision.to_json()
    return {name: text.encode() for name, text in texts.items()} | dict(run.program().files)


def _launch_script(run: Run, env: Mapping[str, str], command: Command, who: str = "the head") -> str:
    """Returns a readable script, one option per line, so that a diff of two runs' scripts shows their differences."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    return (
        "#!/usr/bin/env bash\n"
        f"# Run {run.request.run_id}: what {who} executes. Started by Tridock, which records its exit code.\n"
        "set -Eeuo pipefail\n\n"
        # A scheduler sends it to all processes of a job; the ranks handle it.
        "trap '' USR1\n"
        # `python -m` and DeepSpeed put the current folder first on PYTHONPATH: a folder in the workspace with a
        # package's name would shadow the package.
        f"cd {shlex.quote(run.path)}\n"
        f"{exports}\n"
        f"exec {_one_option_a_line(command.argv)}\n"
    )


def _one_option_a_line(argv: Sequence[str]) -> str:
    lines: list[list[str]] = [[argv[0]]]
    for word in argv[1:]:
        if word.startswith("-"):
            lines.append([word])
        else:
            lines[-1].append(word)
    return " \\\n  ".join(" ".join(shlex.quote(word) for word in line) for line in lines)
