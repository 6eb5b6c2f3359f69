"""A run of your own program: the scripts of its nodes and the first files of its folder. Pure."""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tridock.command import Command
from tridock.contracts import environment, run_folder
from tridock.contracts.supervision import Supervision
from tridock.experiment import dump_experiment
from tridock.experiment.command import CommandExperiment
from tridock.launchers.bundle import RunBundle, hostfile_text
from tridock.launchers.deepspeed import environment_file
from tridock.launchers.programs import Place, has_rank_logs, on_node, program_of
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.ssh import Ssh
from tridock.sink_settings import contracts

# Variables of a step with one task per node: a program would take them for its ranks.
_OF_TASKS = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_GTIDS"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True, slots=True)
class JobStep:
    """How a program starts in a Slurm job."""

    argv: Sequence[str]
    """Runs a script on every node. The last word is the script's path; ``%n`` stands for the node's number."""
    python: str
    """The Python that runs Tridock's own code on the nodes."""
    library: str
    """The folder that holds Tridock's package, for the program's Python."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the site and the job; those of the experiment take precedence."""
    on_head: bool = True
    prepared_at: float | None = None


@dataclass(frozen=True, slots=True)
class CommandRun:
    """The program on its slots."""

    experiment: CommandExperiment
    slots: Mapping[str, Sequence[int]]
    run_id: str
    master_addr: str
    master_port: int
    manifest: Mapping[str, object]
    spares: Mapping[str, Sequence[int]] = field(default_factory=dict)
    workspace: str = run_folder.WORKSPACE
    job: JobStep | None = None
    """None if Tridock starts the program over ssh."""

    @property
    def path(self) -> str:
        """The run's folder, the same on every node."""
        return f"{self.workspace}/runs/{self.run_id}"

    @property
    def python(self) -> str:
        return run_folder.PYTHON if self.job is None else self.job.python

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each node, in hostfile order."""
        found, first = {}, 0
        for node, slots in self.slots.items():
            found[node] = tuple(range(first, first + len(slots)))
            first += len(slots)
        return found

    @property
    def env(self) -> dict[str, str]:
        """The variables that every rank gets in addition to the cluster's environment."""
        own = self.job.env if self.job else program_of(self.experiment.command)[0].env
        env = {**own, **self.experiment.env}
        if "PYTHONPATH" in env:  # the image's PYTHONPATH is where its python finds tridock
            library = self.job.library if self.job else run_folder.CODE
            env["PYTHONPATH"] = ":".join(filter(None, (env["PYTHONPATH"], library)))
        return {
            **env,
            environment.RUN_ID: self.run_id,
            environment.RUN_FOLDER: self.path,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @property
    def on_every_node(self) -> bool:
        """Whether the program starts on every node, not only on the head."""
        return program_of(self.experiment.command)[0].runs_on_every_node(in_job=self.job is not None)

    def argv(self, node_rank: int, *, resume: bool = False) -> tuple[str, ...]:
        """The command line of one node; of the head for a program that reaches the other nodes itself."""
        argv = (resume and self.experiment.resume_command) or self.experiment.command
        hostfile = posixpath.join(self.path, run_folder.HOSTFILE)
        address = (self.master_addr, self.master_port)
        place = Place(
            *(self.slots, node_rank, *address, hostfile, tuple(self.env), self.python),
            in_job=self.job is not None,
            per_node=self.experiment.per == "node",
        )
        return on_node(argv, place)

    def on_nodes(self, script: str) -> tuple[str, ...]:
        """Returns the command that runs a script of the run's folder on every node, whose rank is ``{node_rank}``."""
        if self.job is None:
            return (self.python, "-P", "-m", "tridock.node", "start-nodes", self.path, script)
        return (*self.job.argv[:-1], f"{self.path}/{script.format(node_rank=run_folder.NODE_NUMBER)}")


def make_command_bundle(run: CommandRun) -> RunBundle:
    """Composes the head's command and the first files of the run's folder.

    Raises :class:`RequestError` for command-line options that the cluster determines.
    """
    experiment, files = run.experiment, dict[str, str]()
    files[run_folder.EXPERIMENT] = dump_experiment(experiment)
    ranks = [
        {"rank": rank, "node": node, "slot": slot}
        for node, numbers in run.ranks.items()
        for rank, slot in zip(numbers, run.slots[node], strict=True)
    ]
    plan = {
        "engine": experiment.engine,
        "world_size": len(ranks),
        "ranks": ranks,
        "rank_logs": has_rank_logs(experiment.command, per_node=experiment.per == "node"),
    }
    files[run_folder.PLAN] = json.dumps(plan, indent=2) + "\n"
    files[run_folder.MANIFEST] = json.dumps({**run.manifest, "run_id": run.run_id}, indent=2) + "\n"
    files[run_folder.HOSTFILE] = hostfile_text(run.slots)
    files[run_folder.DEEPSPEED_ENV] = environment_file(run.env)
    if experiment.setup is not None:
        # Nodes that share the folder take turns.
        here, setup = "", f"flock . bash -c {shlex.quote(experiment.setup)}"
        if run.job is not None:
            here = f"export {environment.NODE}=${{SLURMD_NODENAME:-$(hostname)}}\n"
            verb = shlex.join((run.python, "-P", "-m", "tridock.node", "set-up", run.path))
            setup = f"{verb} {setup}"
        files[run_folder.SETUP_SCRIPT] = _script(run, "every node", f"{here}exec {setup}")
    files |= _scripts(run, resume=False)
    if experiment.resume_command is not None:
        files |= _scripts(run, resume=True)
    files[run_folder.SUPERVISION] = _supervision(run).to_json()
    return RunBundle(run.run_id, run.path, Command(run.argv(0)), {name: it.encode() for name, it in files.items()})


def _scripts(run: CommandRun, *, resume: bool) -> dict[str, str]:
    argv = (resume and run.experiment.resume_command) or run.experiment.command
    program, script = program_of(argv)[0], run_folder.RESUME_SCRIPT if resume else run_folder.LAUNCH_SCRIPT
    first = "" if run.experiment.setup is None else f"{shlex.join(run.on_nodes(run_folder.SETUP_SCRIPT))}\n"
    if not program.runs_on_every_node(in_job=run.job is not None):
        deepspeed = f"export DS_ENV_FILE={shlex.quote(f'{run.path}/{run_folder.DEEPSPEED_ENV}')}\n"
        last = f"{deepspeed}exec {shlex.join(run.argv(0, resume=resume))}"
        return {script: _script(run, "the head", f"{first}{last}")}
    pattern = run_folder.node_script(script, "{node_rank}")
    scripts = {script: _script(run, "the head", f"{first}exec {shlex.join(run.on_nodes(pattern))}")}
    for node_rank, (node, slots) in enumerate(run.slots.items()):
        devices = ",".join(map(str, slots)) if run.job is None else "allocated"
        on_devices = shlex.join((run.python, "-P", "-m", "tridock.node", "on-devices", devices))
        own = shlex.join(run.argv(node_rank, resume=resume))
        job = "" if run.job is None else f"export {environment.NODE}={node}\nunset {' '.join(_OF_TASKS)}\n\n"
        body = f"{job}exec {on_devices} \\\n  {own}"
        scripts[pattern.format(node_rank=node_rank)] = _script(run, f"node {node_rank}", body)
    return scripts


def _script(run: CommandRun, who: str, body: str) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in run.env.items())
    return (
        "#!/usr/bin/env bash\n"
        f"# Run {run.run_id}: what {who} executes. Started by Tridock, which records its exit code.\n"
        "set -Eeuo pipefail\n\n"
        f"cd {shlex.quote(posixpath.join(run.path, run_folder.CODE_COPY))}\n"
        f"{exports}\n"
        f"{body}\n"
    )


def _supervision(run: CommandRun) -> Supervision:
    experiment, job, nodes = run.experiment, run.job, tuple(run.slots)
    launcher = Ssh if job is None else Slurm
    return Supervision(
        head=nodes[0],
        ranks=run.ranks,
        remote=nodes[1:] if job is None or job.on_head else nodes,
        master_port=run.master_port,
        hang_timeout_s=experiment.launch.hang_timeout,
        max_restarts=experiment.restart.max,
        node_timeout_s=experiment.restart.node_timeout,
        master_addr=run.master_addr,
        spares={node: tuple(numbers) for node, numbers in run.spares.items()},
        launcher=launcher.name,
        reach=launcher.reach,
        scheduler=launcher.scheduler,
        on_head=job is None or job.on_head,
        prepared_at=None if job is None else job.prepared_at,
        save_signal=experiment.launch.save_signal,
        observed=True,
        metrics=experiment.metrics or "",
        trackers=tuple(tracker.contract for tracker in experiment.trackers),
        notify=contracts(experiment.notify),
    )
