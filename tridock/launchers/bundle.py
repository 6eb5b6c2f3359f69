"""What a run's folder holds before the run starts, as bytes: shown by a dry run, put on the nodes by a launch."""

from __future__ import annotations

import json
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.supervision import Supervision
from tridock.engines import RankProgram, checkpoint_pointer, checkpoints_folder, rank_program
from tridock.experiment import Experiment, dump_experiment
from tridock.launchers.deepspeed import deepspeed_command, environment_file
from tridock.plan import Assessment

_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True, slots=True)
class RunBundle:
    """A run that is ready to start: its id, its folder, the command of the head and the folder's first files."""

    run_id: str
    path: str
    command: Command
    files: Mapping[str, bytes]


def make_bundle(
    experiment: Experiment,
    assessment: Assessment,
    slots: Mapping[str, Sequence[int]],
    *,
    run_id: str,
    master_addr: str,
    master_port: int,
    manifest: Mapping[str, object],
    workspace: str = run_folder.WORKSPACE,
    node_rank: int | None = None,
    spares: Mapping[str, Sequence[int]] | None = None,
) -> RunBundle:
    """Composes the run's files and the head's command.

    ``workspace`` is the folder that relative paths start from, the same on every node. ``node_rank`` is for nodes that
    each start their own ranks: the command is that node's. ``spares`` may take the place of a node that is lost.
    """
    run = _Run.of(experiment, assessment, slots, run_id, workspace)
    program, hostfile = run.program(), f"{run.path}/{run_folder.HOSTFILE}"
    command, resume = (
        deepspeed_command(words, slots, hostfile, master_addr, master_port, node_rank)
        for words in (program, run.program(resume=True))
    )
    # Nodes that each start their own ranks need not reach each other by ssh.
    remote = tuple(list(slots)[1:]) if node_rank is None else ()
    supervision = replace(
        run.supervision(master_port, remote),
        master_addr=master_addr,
        spares={node: tuple(numbers) for node, numbers in (spares or {}).items()},
    )
    env = {**program.env, "DS_ENV_FILE": f"{run.path}/{run_folder.DEEPSPEED_ENV}"}
    scripts = {run_folder.launch_script(node_rank or 0): command, run_folder.RESUME_SCRIPT: resume}
    return RunBundle(run_id, run.path, command, run.files(supervision, manifest, env, scripts))


def slurm_bundle(
    experiment: Experiment,
    assessment: Assessment,
    slots: Mapping[str, Sequence[int]],
    argv: Sequence[str],
    *,
    run_id: str,
    workspace: str,
    master_port: int,
    env: Mapping[str, str],
    manifest: Mapping[str, object],
    on_head: bool,
    begun: float,
) -> RunBundle:
    """The same for a job of Slurm, whose script says how the ranks start: ``argv`` ends in the words of their program.

    ``env`` is the site's, which the experiment's wins over. ``on_head``: this is the first node; from anywhere else
    that is watched as the others are, through Slurm. ``begun`` (a file's time) is when the run was first prepared.
    """
    run = _Run.of(experiment, assessment, slots, run_id, workspace)
    command = Command(tuple(argv))
    # Every engine's program takes the last --load.
    resume = command.extended(("--load", checkpoints_folder(run.experiment, run.path)))
    remote = tuple(slots)[1:] if on_head else tuple(slots)
    supervision = run.supervision(master_port, remote)
    supervision = replace(supervision, reached_by="srun", on_head=on_head, begun=begun)
    env = {**env, **run.program().env}
    if "--launcher=pdsh" in argv:  # its ssh sessions know nothing of a job's environment
        env["DS_ENV_FILE"] = f"{run.path}/{run_folder.DEEPSPEED_ENV}"
    scripts = {run_folder.launch_script(0): command, run_folder.RESUME_SCRIPT: resume}
    return RunBundle(run_id, run.path, command, run.files(supervision, manifest, env, scripts))


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run is, however its ranks are started. ``path`` is its folder, the same on every node."""

    experiment: Experiment
    assessment: Assessment
    slots: Mapping[str, Sequence[int]]
    run_id: str
    path: str

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        assessment: Assessment,
        slots: Mapping[str, Sequence[int]],
        run_id: str,
        workspace: str,
    ) -> _Run:
        resolved = experiment.resolved(assessment.laid_out.data_parallel_size)
        return cls(resolved, assessment, slots, run_id, f"{workspace}/runs/{run_id}")

    def program(self, *, resume: bool = False) -> RankProgram:
        return rank_program(self.experiment, self.assessment.laid_out, self.run_id, self.path, resume=resume)

    def supervision(self, master_port: int, remote: tuple[str, ...]) -> Supervision:
        experiment, nodes = self.experiment, list(self.slots)
        ranks: dict[str, list[int]] = {node: [] for node in nodes}
        for rank in self.assessment.laid_out.ranks:
            ranks[rank.node].append(rank.rank)
        pointer = f"{checkpoints_folder(experiment, self.path)}/{checkpoint_pointer(experiment)}"
        return Supervision(
            head=nodes[0],
            ranks={node: tuple(numbers) for node, numbers in ranks.items()},
            remote=remote,
            master_port=master_port,
            hang_timeout_s=experiment.launch.hang_timeout,
            max_restarts=experiment.restart.max,
            restart_window_s=experiment.restart.window,
            node_timeout_s=experiment.restart.node_timeout,
            min_nodes=experiment.restart.min_nodes,
            pointer=pointer if experiment.train.save else None,
        )

    def files(
        self,
        supervision: Supervision,
        manifest: Mapping[str, object],
        env: Mapping[str, str],
        scripts: Mapping[str, Command],
    ) -> Mapping[str, bytes]:
        """The folder's first files. A run that saves nothing has no script to go on by."""
        slots = self.slots.items()
        texts = {
            run_folder.EXPERIMENT: dump_experiment(self.experiment),
            run_folder.PLAN: self.assessment.to_json(),
            run_folder.MANIFEST: json.dumps({**manifest, "run_id": self.run_id}, indent=2) + "\n",
            run_folder.HOSTFILE: "".join(f"{node} slots={_slot_count(numbers)}\n" for node, numbers in slots),
            run_folder.DEEPSPEED_ENV: environment_file({n: v for n, v in env.items() if n != "DS_ENV_FILE"}),
        }
        for name, command in scripts.items():
            if name != run_folder.RESUME_SCRIPT or self.experiment.train.save:
                texts[name] = _launch_script(self.run_id, self.path, env, command)
        texts[run_folder.SUPERVISION] = supervision.to_json()
        return {name: text.encode() for name, text in texts.items()} | dict(self.program().files)


def default_port(run_id: str) -> int:
    """A rendezvous port for a run that names none: from its id, so that two runs of a node rarely meet."""
    return _FIRST_PORT + zlib.crc32(run_id.encode()) % _PORTS


def _slot_count(numbers: Sequence[int]) -> int:
    # A filter may leave slots 4 and 5 of a node: the hostfile must still declare the six that DeepSpeed counts.
    return max(numbers) + 1


def _launch_script(run_id: str, path: str, env: Mapping[str, str], command: Command) -> str:
    """A readable script: one option a line, so that two runs' scripts differ where their commands do."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    return (
        "#!/usr/bin/env bash\n"
        f"# Run {run_id}: what the head executes. Started by Tridock, which records its exit code.\n"
        "set -Eeuo pipefail\n\n"
        # A scheduler sends it to all processes of a job; it is for the ranks, which answer it.
        "trap '' USR1\n"
        # DeepSpeed puts the current folder first on PYTHONPATH: in the workspace, a user's folder of the same name as
        # a package would stand in for it.
        f"cd {shlex.quote(path)}\n"
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
