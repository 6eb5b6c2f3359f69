"""A run of the user's own program: the scripts of its nodes and the first files of its folder. Pure."""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tridock.command import Command
from tridock.contracts import environment, run_folder
from tridock.contracts.supervision import Supervision
from tridock.experiment import dump_experiment
from tridock.experiment.command import CommandExperiment
from tridock.launchers.deepspeed import environment_file
from tridock.launchers.programs import Place, has_rank_logs, on_node, program_of
from tridock.launchers.run import RunBundle, hostfile_text
from tridock.launchers.ssh import Ssh

_NODE = (run_folder.PYTHON, "-P", "-m", "tridock.node")


@dataclass(frozen=True, slots=True)
class CommandRun:
    """The program on its slots."""

    experiment: CommandExperiment
    slots: Mapping[str, Sequence[int]]
    run_id: str
    master_addr: str
    master_port: int
    manifest: Mapping[str, object]

    @property
    def path(self) -> str:
        """The run's folder, the same on every node."""
        return f"{run_folder.WORKSPACE}/runs/{self.run_id}"

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Every node's ranks, in the hostfile's order."""
        found, first = {}, 0
        for node, slots in self.slots.items():
            found[node] = tuple(range(first, first + len(slots)))
            first += len(slots)
        return found

    @property
    def env(self) -> dict[str, str]:
        """What every rank has beside the cluster's environment."""
        env = dict(self.experiment.env)
        if "PYTHONPATH" in env:  # the image's own is where its python finds tridock
            env["PYTHONPATH"] += f":{run_folder.CODE}"
        return {
            **env,
            environment.RUN_ID: self.run_id,
            environment.RUN_FOLDER: self.path,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def words(self, node_rank: int, *, resume: bool = False) -> tuple[str, ...]:
        """The command line of one node; of the head for a program that reaches the other nodes by itself."""
        words = (resume and self.experiment.resume_command) or self.experiment.command
        hostfile = posixpath.join(self.path, run_folder.HOSTFILE)
        place = Place(self.slots, node_rank, self.master_addr, self.master_port, hostfile, tuple(self.env))
        return on_node(words, place)


def make_command_bundle(run: CommandRun) -> RunBundle:
    """Composes the head's command and the first files of the run's folder.

    Raises :class:`RequestError` for options of the command line that are the cluster's to decide.
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
        "rank_logs": has_rank_logs(experiment.command),
    }
    files[run_folder.PLAN] = json.dumps(plan, indent=2) + "\n"
    files[run_folder.MANIFEST] = json.dumps({**run.manifest, "run_id": run.run_id}, indent=2) + "\n"
    files[run_folder.HOSTFILE] = hostfile_text(run.slots)
    files[run_folder.DEEPSPEED_ENV] = environment_file(run.env)
    if experiment.setup is not None:
        # Where nodes share the folder, one after another.
        setup = f"exec flock . bash -c {shlex.quote(experiment.setup)}"
        files[run_folder.SETUP_SCRIPT] = _script(run, "every node", setup)
    files |= _scripts(run, resume=False)
    if experiment.resume_command is not None:
        files |= _scripts(run, resume=True)
    files[run_folder.SUPERVISION] = _supervision(run).to_json()
    return RunBundle(run.run_id, run.path, Command(run.words(0)), {name: it.encode() for name, it in files.items()})


def _scripts(run: CommandRun, *, resume: bool) -> dict[str, str]:
    words = (resume and run.experiment.resume_command) or run.experiment.command
    program, script = program_of(words)[0], run_folder.RESUME_SCRIPT if resume else run_folder.LAUNCH_SCRIPT
    first = "" if run.experiment.setup is None else f"{shlex.join((*_start_nodes(run), run_folder.SETUP_SCRIPT))}\n"
    if not program.on_every_node:
        deepspeed = f"export DS_ENV_FILE={shlex.quote(f'{run.path}/{run_folder.DEEPSPEED_ENV}')}\n"
        last = f"{deepspeed}exec {shlex.join(run.words(0, resume=resume))}"
        return {script: _script(run, "the head", f"{first}{last}")}
    pattern = f"{script.removesuffix('.sh')}-node-{{node_rank}}.sh"
    scripts = {script: _script(run, "the head", f"{first}exec {shlex.join((*_start_nodes(run), pattern))}")}
    for node_rank, (node, slots) in enumerate(run.slots.items()):
        on_devices = shlex.join((*_NODE, "on-devices", ",".join(map(str, slots))))
        own = shlex.join(run.words(node_rank, resume=resume))
        scripts[pattern.format(node_rank=node_rank)] = _script(run, f"node {node}", f"exec {on_devices} \\\n  {own}")
    return scripts


def _start_nodes(run: CommandRun) -> tuple[str, ...]:
    return (*_NODE, "start-nodes", run.path)


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
    experiment = run.experiment
    return Supervision(
        head=next(iter(run.slots)),
        ranks=run.ranks,
        remote=tuple(run.slots)[1:],
        master_port=run.master_port,
        hang_timeout_s=experiment.launch.hang_timeout,
        max_restarts=experiment.restart.max,
        node_timeout_s=experiment.restart.node_timeout,
        master_addr=run.master_addr,
        launcher=Ssh.name,
        reach=Ssh.reach,
        observed=True,
        metrics=experiment.metrics or "",
    )
