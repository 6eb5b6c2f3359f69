"""A run: a program on slots, with a plan if an engine trains. Composes its command and its folder's first files. Pure.

Imports no planner: `tridock run` needs none.
"""

from __future__ import annotations

import json
import shlex
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.run_folder import RENDEZVOUS_PORTS
from tridock.contracts.supervision import Reach, Supervision
from tridock.experiment import AnyExperiment, CommandExperiment, dump_experiment
from tridock.launchers.deepspeed import environment_file
from tridock.launchers.programs import has_rank_logs, is_per_slot
from tridock.tracker_settings import contracts

if TYPE_CHECKING:
    from tridock.engines import RankProgram
    from tridock.plan import Assessment

DEEPSPEED_ENV = "DS_ENV_FILE"


@dataclass(frozen=True, slots=True)
class Run:
    """What to run, and where its ranks are placed. Its folder has the same path on every node."""

    experiment: AnyExperiment
    """Resolved, if it has a plan."""
    slots: Mapping[str, Sequence[int]]
    run_id: str
    assessment: Assessment | None = None
    """The plan, with the program of the ranks and the checkpoints of an engine; None for your own program."""
    manifest: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    """More files of its folder."""
    master_port: int | None = None
    master_addr: str = "127.0.0.1"
    workspace: str = run_folder.WORKSPACE
    """The base folder of relative paths, the same on every node."""
    spares: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Nodes that may replace a lost one."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """As in :class:`Supervision`, as are the next two."""
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    queued: bool = False

    @property
    def port(self) -> int:
        """The rendezvous port on the head: as found there, as the experiment names it, or the default."""
        return self.master_port or self.experiment.launch.master_port or default_port(self.run_id)

    @property
    def path(self) -> str:
        return f"{self.workspace}/runs/{self.run_id}"

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each node, in the slots' order."""
        found, first = {}, 0
        for node, slots in self.slots.items():
            found[node] = tuple(range(first, first + len(slots)))
            first += len(slots)
        return found

    @property
    def planned(self) -> Assessment:
        assert self.assessment is not None
        return self.assessment

    @property
    def command(self) -> CommandExperiment:
        assert isinstance(self.experiment, CommandExperiment)
        return self.experiment

    @property
    def programs(self) -> tuple[RankProgram, RankProgram]:
        """The program of a planned run's ranks: at the start, and from the run's own checkpoints."""
        first, again = (self.planned.program(self.run_id, self.path, resume=resume) for resume in (False, True))
        return first, again

    @property
    def document(self) -> str:
        """The content of ``plan.json``."""
        if self.assessment is not None:
            return self.assessment.to_json()
        ranks = [
            {"rank": rank, "node": node, "slot": slot}
            for node, numbers in self.ranks.items()
            for rank, slot in zip(numbers, self.slots[node], strict=True)
        ]
        logs = has_rank_logs(self.command.command, self.command.per)
        plan = {"engine": self.command.engine, "world_size": len(ranks), "ranks": ranks, "rank_logs": logs}
        return json.dumps(plan, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Start:
    """How a launcher starts a run: the head's command, the environment, and scripts by name.

    A script is who runs it, and its last lines.
    """

    command: Command
    env: Mapping[str, str]
    scripts: Mapping[str, tuple[str, str]]
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What the ranks read from the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    name: ClassVar[str]
    scheduler: ClassVar[str | None] = None
    """The scheduler that requeues a preempted run or one that lost a node; None if the supervisor restarts it."""
    reach: ClassVar[Reach] = Reach()
    """How the supervisor runs ``python -m tridock.node`` on another node."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the site; those of the experiment take precedence."""
    on_head: bool = True
    """Whether the supervisor runs on the first node; from a login node it reaches that node like the others."""
    prepared_at: float | None = None
    """When the run was first prepared, as a file time."""
    python: str = run_folder.PYTHON
    """The Python that runs Tridock's own code on the nodes."""
    library: str = run_folder.CODE
    """The folder that holds Tridock's package, for your program's Python."""

    @abstractmethod
    def remote(self, nodes: Sequence[str]) -> Sequence[str]:
        """Returns those of a run's nodes that the supervisor reaches."""

    @abstractmethod
    def start(self, run: Run) -> Start:
        """Returns the scripts that start the run's ranks, and their environment."""

    def on_nodes(self, run: Run, script: str) -> tuple[str, ...]:
        """Returns the command that runs a script of the run's folder on every node, whose rank is ``{node_rank}``."""
        return (self.python, "-P", "-m", "tridock.node", "start-nodes", run.path, script)


@dataclass(frozen=True, slots=True)
class RunBundle:
    """A run that is ready to start: its id, its folder, the head's command and the folder's first files."""

    run_id: str
    path: str
    command: Command
    files: Mapping[str, bytes]
    waits_for: tuple[str, ...] | None = None
    """For a queued run, the runs that hold its slots or precede it."""

    @property
    def supervision(self) -> Supervision:
        return Supervision.from_json(self.files[run_folder.SUPERVISION].decode())


def make_bundle(run: Run, launcher: Launcher) -> RunBundle:
    """Composes the head's command and the first files of the run's folder.

    Raises :class:`RequestError` for options of your own program that the cluster determines.
    """
    start = launcher.start(run)
    ranks = {name: value for name, value in start.env.items() if name != DEEPSPEED_ENV}
    texts = {
        run_folder.EXPERIMENT: dump_experiment(run.experiment),
        run_folder.PLAN: run.document,
        run_folder.MANIFEST: json.dumps({**run.manifest, "run_id": run.run_id}, indent=2) + "\n",
        # If filters leave slots 4 and 5 of a node, it must still declare six for DeepSpeed.
        run_folder.HOSTFILE: "".join(f"{node} slots={max(numbers) + 1}\n" for node, numbers in run.slots.items()),
        **({run_folder.DEEPSPEED_ENV: environment_file(ranks)} if DEEPSPEED_ENV in start.env else {}),
        **{name: _script(run, start.env, *script) for name, script in start.scripts.items()},
        run_folder.SUPERVISION: _supervision(run, launcher).to_json(),
    }
    files = {**{name: text.encode() for name, text in texts.items()}, **run.files}
    return RunBundle(run.run_id, run.path, start.command, files | dict(start.files))


def default_port(run_id: str) -> int:
    """Returns the default rendezvous port, derived from the run id so that two runs on a node rarely collide."""
    return RENDEZVOUS_PORTS[zlib.crc32(run_id.encode()) % len(RENDEZVOUS_PORTS)]


def start_planned(
    run: Run, program: RankProgram, commands: Mapping[str, Command], env: Mapping[str, str] | None = None
) -> Start:
    """Returns the start of a run with a plan; ``commands``, the head's first, are those of the scripts by name.

    ``env``: other variables than the program's. A run that saves no checkpoint has no script for a restart.
    """
    saves = run.planned.experiment.train.save
    of_nodes = (run_folder.RANKS_SCRIPT, run_folder.RESUME_RANKS_SCRIPT)
    resumes = (run_folder.RESUME_SCRIPT, run_folder.RESUME_RANKS_SCRIPT)
    scripts = {
        name: ("each node" if name in of_nodes else "the head", f"exec {_one_option_a_line(command.argv)}")
        for name, command in commands.items()
        if saves or name not in resumes
    }
    return Start(next(iter(commands.values())), env or program.env, scripts, program.files)


def _supervision(run: Run, launcher: Launcher) -> Supervision:
    experiment, nodes = run.experiment, tuple(run.slots)
    supervision = Supervision(
        head=nodes[0],
        ranks=run.ranks,
        remote=tuple(launcher.remote(nodes)),
        master_port=run.port,
        hang_timeout_s=experiment.launch.hang_timeout,
        max_restarts=experiment.restart.max,
        node_timeout_s=experiment.restart.node_timeout,
        spares={node: tuple(numbers) for node, numbers in run.spares.items()},
        master_addr=run.master_addr,
        addresses=run.addresses,
        devices={node: tuple(names) for node, names in run.devices.items()},
        queued=run.queued,
        launcher=launcher.name,
        reach=launcher.reach,
        scheduler=launcher.scheduler,
        on_head=launcher.on_head,
        prepared_at=launcher.prepared_at,
        trackers=tuple(tracker.contract for tracker in experiment.trackers),
        notify=contracts(experiment.notify),
    )
    if run.assessment is None:
        metrics, save_signal = run.command.metrics or "", run.command.launch.save_signal
        per_slot = is_per_slot(run.command.command, run.command.per)
        return replace(supervision, observed=True, per_slot=per_slot, metrics=metrics, save_signal=save_signal)
    restart, saves = run.planned.experiment.restart, run.planned.experiment.train.save
    checkpoints = run.planned.checkpoints(run.path) if saves else None
    return replace(
        supervision,
        restart_window_s=restart.window,
        min_nodes=restart.min_nodes,
        checkpoints=checkpoints,
        planned_step_s=run.assessment.seconds,
    )


def _script(run: Run, env: Mapping[str, str], who: str, body: str) -> str:
    """Returns a readable script, one option per line, so that a diff of two runs' scripts shows their differences."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    # A scheduler sends USR1 to all processes of a job; an engine's ranks handle it, and your program may.
    trap = "" if run.assessment is None else "trap '' USR1\n"
    # `python -m` and DeepSpeed put the current folder first on PYTHONPATH: a folder in the workspace with a package's
    # name would shadow the package.
    folder = f"{run.path}/{run_folder.CODE_COPY}" if run.assessment is None else run.path
    return (
        "#!/usr/bin/env bash\n"
        f"# Run {run.run_id}: what {who} executes. Started by Tridock, which records its exit code.\n"
        f"set -Eeuo pipefail\n\n{trap}cd {shlex.quote(folder)}\n{exports}\n{body}\n"
    )


def _one_option_a_line(argv: Sequence[str]) -> str:
    lines: list[list[str]] = [[argv[0]]]
    for word in argv[1:]:
        if word.startswith("-"):
            lines.append([word])
        else:
            lines[-1].append(word)
    return " \\\n  ".join(" ".join(shlex.quote(word) for word in line) for line in lines)
