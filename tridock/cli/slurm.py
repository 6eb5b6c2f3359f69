"""``tridock slurm``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tridock.cli.options import Arguments, Commands, Parser, add_command, add_group
from tridock.cli.output import print_json, print_tables
from tridock.contracts.appends import printing_to_a_full_disk

if TYPE_CHECKING:
    from tridock.ops.slurm.submit import SubmitOptions

_TEXTS: Final = {
    "partition": "Slurm partition",
    "account": "Slurm account",
    "qos": "quality of service",
    "constraint": "features that the nodes must have",
    "time": "time limit in Slurm's format, e.g. 20:00:00",
    "mem": "memory per node, e.g. 160G",
    "hint": "Slurm's --hint, e.g. nomultithread",
    "gpu": "GPU for the plan (v100-32gb, a100-80gb, …), or its memory (24gib)",
    "launcher": "how to start the ranks: torchrun, srun, deepspeed, deepspeed-slurm or deepspeed-pdsh",
}
_NUMBERS: Final = {
    "nodes": "number of nodes",
    "gpus_per_node": "GPUs per node; each has one rank",
    "cpus_per_node": "CPUs per node, divided among its tasks",
    "signal_lead": "seconds before the time limit at which Slurm tells the run to save",
    "array_tasks": "maximum number of array tasks that run at the same time",
}


def add(commands: Commands) -> None:
    slurm = add_group(commands, "slurm", "submit and manage runs on a Slurm cluster")
    job = "--config configs/jean-zay/7.5b.yaml --profile configs/slurm/jean-zay.yaml --nodes 4"
    sweep = "--config configs/demo.yaml --nodes 1 --sweep optimizer.lr=1e-3,3e-4"
    _add_submit_options(add_command(slurm, "render", _render, "print the sbatch script", job))
    submit = add_command(slurm, "submit", _submit, "check and submit a job", f"{job} --account abc@v100", sweep)
    _add_submit_options(submit)
    submit.add_flag("--json", "print the job's id and its runs as JSON")
    _add_submit_options(
        add_command(slurm, "run", _run, "start a run inside an allocation", "--config configs/demo.yaml --nodes 2")
    )

    status = add_command(slurm, "status", _status, "list submitted runs and their progress", "", "--json")
    _add_shared_workspace(status)
    status.add_flag("--json", "print the runs as JSON")

    logs = add_command(slurm, "logs", _logs, "print a run's output", "--follow", "--rank 0")
    _add_run(logs)
    text = "print the log of rank N instead; repeatable"
    logs.add_argument("--rank", type=int, action="append", default=[], metavar="N", help=text)
    logs.add_flag("--follow", "follow the output until the job ends")

    _add_run(add_command(slurm, "cancel", _cancel, "cancel a run's job", "", "1234"))

    summary = "start and supervise a run (used by the job script)"
    example = "--config configs/demo.yaml runs/demo -- srun true"
    supervise = add_command(slurm, "supervise", _supervise, summary, example)
    text = "YAML file of the experiment, if the run folder has none yet"
    supervise.add_argument("--config", type=Path, metavar="CONFIG", help=text)
    supervise.add_set()
    text = "environment variable of the ranks; repeatable"
    supervise.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help=text)
    supervise.add_flag("--no-requeue", "do not requeue the job")
    supervise.add_flag("--container", "start your own program in a container whose image has Tridock's layer")
    supervise.add_argument("folder", type=Path, metavar="RUN", help="run folder")
    supervise.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command that starts all ranks")


def _add_submit_options(parser: Parser) -> None:
    parser.add_config(several=True)
    parser.add_set()
    text = "job array with one task per value, e.g. optimizer.lr=1e-3,3e-4; repeat for all combinations"
    parser.add_argument("--sweep", action="append", default=[], metavar="FIELD=VALUES", help=text)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="site profile, e.g. configs/slurm/jean-zay.yaml")
    job = parser.add_argument_group("job", "Each option overrides the site profile.")
    for name, text in _NUMBERS.items():
        job.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    for name, text in _TEXTS.items():
        job.add_argument(f"--{name}", help=text)
    text = "container runtime of the ranks"
    job.add_argument("--container", choices=("none", "apptainer", "pyxis", "docker"), help=text)
    job.add_argument("--image", help="container image: a .sif or .sqsh file, or a name")
    job.add_argument("--no-requeue", action="store_true", help="do not requeue the job at its time limit")
    _add_shared_workspace(parser)
    parser.add_flag("--force", "submit even if the plan does not fit in GPU memory")


def _add_shared_workspace(parser: Parser) -> None:
    parser.add_workspace(", on a file system that all nodes share")


def _add_run(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="id of the run or of its job (default: the newest run)")
    _add_shared_workspace(parser)


def _submit_options_of(arguments: Arguments) -> SubmitOptions:
    from tridock.ops.slurm.submit import SubmitOptions

    changes: dict[str, Any] = {
        name: value for name in (*_NUMBERS, *_TEXTS) if (value := getattr(arguments, name)) is not None
    }
    for option, field in (("container", "container.kind"), ("image", "container.image")):
        if getattr(arguments, option) is not None:
            changes[field] = getattr(arguments, option)
    if arguments.no_requeue:
        changes["requeue"] = False
    return SubmitOptions(
        arguments.config or [arguments.required_config],
        arguments.set,
        arguments.sweep,
        arguments.profile,
        changes,
        arguments.workspace,
        arguments.force,
    )


def _render(arguments: Arguments) -> int:
    """Print the sbatch script. Contacts neither Slurm nor any node."""
    from tridock.ops.slurm.submit import render_script

    print(render_script(_submit_options_of(arguments)), end="")
    return 0


def _submit(arguments: Arguments) -> int:
    """Check the plan, the data and Slurm's limits, submit a job, and print its id and the run folder."""
    from tridock.ops.slurm.submit import submit

    job = submit(_submit_options_of(arguments), lambda line: print(line, file=sys.stderr))
    if arguments.json:
        runs = [{"run_id": folder.name, "folder": str(folder)} for folder in job.folders]
        print_json(job=job.job_id, runs=runs)
        return 0
    print(f"job {job.job_id}")
    for folder in job.folders:
        print(f"run {folder.name}; folder {folder}")
    return 0


def _run(arguments: Arguments) -> int:
    """Start a run inside an existing allocation, for example from salloc."""
    from tridock.ops.slurm.submit import run_in_allocation

    run_in_allocation(_submit_options_of(arguments))


def _status(arguments: Arguments) -> int:
    """List the runs that were submitted from this folder, with the state and progress of each."""
    from tridock.ops.slurm.jobs import table

    rows = table(arguments.workspace)
    if arguments.json:
        print_json(runs=rows)
        return 0
    from tridock.ops.slurm.jobs import as_table

    print_tables(as_table(rows))
    return 0


def _logs(arguments: Arguments) -> int:
    """Print the output of a run, or the log of a rank."""
    from tridock.ops.slurm.jobs import show_logs

    return show_logs(arguments.workspace, arguments.run, arguments.rank, follow=arguments.follow)


def _cancel(arguments: Arguments) -> int:
    """Cancel the job of a run, running or queued. The run does not save a checkpoint first."""
    from tridock.ops.slurm.jobs import cancel

    run = cancel(arguments.workspace, arguments.run)
    print(f"cancelled job {run.job_id}, run {run.folder.name}")
    return 0


def _supervise(arguments: Arguments) -> int:
    """Start all ranks with COMMAND and supervise them. The sbatch script calls it on the first node of the job."""
    from tridock.ops.slurm.supervise import Job, supervise

    env = {name: value for name, _, value in (word.partition("=") for word in arguments.env)}
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    folder = arguments.folder.absolute()
    requeue = not arguments.no_requeue
    job = Job(folder, argv, arguments.config, arguments.set, env, requeue=requeue, in_container=arguments.container)
    with printing_to_a_full_disk():
        return supervise(job)
