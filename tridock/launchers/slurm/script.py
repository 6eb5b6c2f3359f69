"""Renders the sbatch script, as a person would write it for this experiment and site. Pure."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from tridock.contracts import run_folder
from tridock.contracts.run_folder import RENDEZVOUS_PORTS as PORTS
from tridock.launchers.run import Run
from tridock.launchers.slurm.ranks import RANK_LAUNCHERS, RUN, launch_lines, tasks_per_node
from tridock.launchers.slurm.request import Request

PROGRAM: Final = "program"
"""The file in a job array run's folder with its ranks' module and arguments, one word per line."""
_NUMBER = {True: "%A_%a", False: "%j"}


R = TypeVar("R", bound=Run, covariant=True)


@dataclass(frozen=True)
class Script(Generic[R]):
    """A job's runs and how each starts.

    ``workspace`` is the folder with ``data/`` and ``runs/``, the same on every node. ``source`` are the arguments that
    name the job's experiment if the run's folder was not written beforehand.
    """

    request: Request
    elements: Sequence[R]
    workspace: str
    source: Sequence[str] = ()
    in_allocation: bool = False
    """For an existing allocation: bash runs the script, and Slurm cannot requeue it."""

    @property
    def is_array(self) -> bool:
        return len(self.elements) > 1

    @property
    def first(self) -> R:
        return self.elements[0]


def render(script: Script[Any]) -> str:
    blocks = [
        "\n".join(_head(script)),
        "\n".join(_shell(script)),
        "\n".join(_which_run(script)),
        "\n".join(_meeting(script.request)),
        "\n".join(_launch(script)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def program_argv(script: Script[Any], run: Run) -> tuple[str, ...]:
    """Returns the module and arguments of a run's ranks for the launcher; for your own program, the nodes' scripts."""
    path = f"{script.workspace}/runs/{run.run_id}"
    if run.assessment is None:
        return (f"{path}/{run_folder.node_script(run_folder.LAUNCH_SCRIPT, run_folder.NODE_NUMBER)}",)
    program = run.assessment.program(run.run_id, path)
    return tuple(map(RANK_LAUNCHERS[script.request.launcher].quote, (program.module, *program.arguments)))


def _head(script: Script[Any]) -> Iterator[str]:
    request, assessment = script.request, script.first.assessment
    name, ranks = script.first.experiment.name, request.nodes * request.ranks_per_node
    runs = f"{len(script.elements)} runs, each of " if script.is_array else ""
    yield "#!/usr/bin/env bash"
    where = f"{request.nodes} nodes" if request.nodes > 1 else "1 node"
    what = "" if assessment is None else f", {assessment.laid_out.layout}"
    yield f"# {name}: {runs}{ranks} ranks on {where}{what}. Written by `tridock slurm`."
    if not script.in_allocation:
        yield from (f"#SBATCH --{option}" for option in _options(script, name))
        yield from (f"#SBATCH {option}" for option in request.sbatch)


def _options(script: Script[Any], name: str) -> Iterator[str]:
    request = script.request
    tasks = tasks_per_node(request)
    yield f"job-name={name}"
    yield f"nodes={request.nodes}"
    yield f"ntasks-per-node={tasks}"
    if request.cpus_per_node is not None:
        yield f"cpus-per-task={request.cpus_per_node // tasks}"
    if request.hint is not None:
        yield f"hint={request.hint}"
    if request.gpu_request != "none":
        type_ = f"{request.gpu_type}:" if request.gpu_type else ""
        start = "gres=gpu:" if request.gpu_request == "gres" else "gpus-per-node="
        yield f"{start}{type_}{request.gpus_per_node}"
    for option in ("mem", "partition", "account", "qos", "constraint", "time"):
        if (value := getattr(request, option)) is not None:
            yield f"{option}={value}"
    if request.exclusive:
        yield "exclusive"
    if script.is_array:
        at_once = f"%{request.array_tasks}" if request.array_tasks else ""
        yield f"array=0-{len(script.elements) - 1}{at_once}"
    if request.signal_lead:
        yield f"signal=B:USR1@{request.signal_lead}"
    yield "requeue" if request.requeue else "no-requeue"
    yield "open-mode=append"
    yield f"output={_output(script)}"


def _output(script: Script[Any]) -> str:
    if script.source:  # the job itself creates the run's folder
        return f"slurm-{_NUMBER[script.is_array]}.out"
    folder = f"{script.workspace}/runs"
    if script.is_array:
        return f"{folder}/slurm-{_NUMBER[True]}.out"
    return f"{folder}/{script.first.run_id}/logs/slurm-{_NUMBER[False]}.out"


def _shell(script: Script[Any]) -> Iterator[str]:
    yield "set -Eeuo pipefail"
    if not script.in_allocation and script.request.signal_lead:
        yield "trap '' USR1  # the supervisor answers it"
    yield from script.request.setup


def _which_run(script: Script[Any]) -> Iterator[str]:
    yield f"WORKSPACE={shlex.quote(script.workspace)}"
    if not script.is_array:
        yield f'RUN="$WORKSPACE/runs/{script.first.run_id}"'
        return
    yield "runs=("
    yield from (f"  {element.run_id}" for element in script.elements)
    yield ")"
    yield 'RUN="$WORKSPACE/runs/${runs[SLURM_ARRAY_TASK_ID]}"'
    yield f'mapfile -t program <"$RUN/{PROGRAM}"'


def _meeting(request: Request) -> Iterator[str]:
    yield "# The rendezvous is on the first node, at a port that no other job has."
    yield 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield "export MASTER_ADDR=${nodes[0]}"
    yield f"export MASTER_PORT=$(({PORTS.start} + SLURM_JOB_ID % {len(PORTS)}))"
    yield 'mkdir -p "$RUN/logs"'
    yield f"""printf '%s slots={request.gpus_per_node}\\n' "${{nodes[@]}}" >"$RUN/{run_folder.HOSTFILE}\""""


def _launch(script: Script[Any]) -> Iterator[str]:
    request = script.request
    if script.is_array:
        program = ['"${program[@]}"']
    else:
        program = [_quoted(word, script) for word in program_argv(script, script.first)]
    env = sorted({*request.env, *(name for element in script.elements for name in element.experiment.env)})
    requeues = request.requeue and not script.in_allocation
    own = script.first.assessment is None
    what = "runs a script of the run's folder on every node" if own else "starts all ranks"
    yield f"# What follows the -- {what}. The supervisor watches {'the ranks' if own else 'them'} on every node."
    if requeues and own:
        yield "# It signals them before the time limit, and queues the job again then, or if a node is lost:"
        yield "# the program then starts with its resume_command."
    elif requeues:
        yield "# It queues the job again where the run has saved because its time was over, or has lost a node:"
        yield "# the run then continues from its newest checkpoint."
    lines = launch_lines(request, program, env)
    if any(word.startswith("'") and "$" in word for line in lines for word in line):
        yield "# shellcheck disable=SC2016  # a task alone knows the number and the GPUs of its node"
    supervise = [request.tridock, "slurm", "supervise", *(() if requeues else ("--no-requeue",))]
    supervise += [f"--env={shlex.quote(f'{name}={value}')}" for name, value in request.env.items()]
    if own and request.container.kind != "none":
        supervise.append("--container")
    supervise += [shlex.quote(word) for word in script.source]
    # Replaces the script (exec), so that Slurm signals the supervisor.
    rendered = [f"exec {' '.join([*supervise, RUN, '--'])}", *(" ".join(line) for line in _short(lines))]
    yield " \\\n  ".join(rendered)


def _quoted(word: str, script: Script[Any]) -> str:
    """Quotes a word of the program for bash; paths in the run's folder or the workspace use their variable."""
    run = f"{script.workspace}/runs/{script.first.run_id}"
    for folder, variable in ((run, "RUN"), (script.workspace, "WORKSPACE")):
        rest = word.removeprefix(folder)
        if rest != word and re.fullmatch(r"(/[\w./:@+=,%-]+)?", rest):
            return f'"${variable}{rest}"'
    return shlex.quote(word)


def _short(lines: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yields lines that fit a screen, broken before an option."""
    for line in lines:
        part: list[str] = []
        for word in line:
            if part and word.startswith("-") and len(" ".join([*part, word])) > 110:
                yield part
                part = []
            part.append(word)
        yield part
