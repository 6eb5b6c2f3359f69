"""``tridock slurm``: its subcommands and their flags. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tridock.ops.slurm.submit import Wish

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXTS: Final = {
    "partition": "partition",
    "account": "account",
    "qos": "quality of service",
    "constraint": "features that the nodes must have",
    "time": "time limit, in Slurm's forms",
    "mem": "memory of a node, as 160G",
    "hint": "nomultithread, …",
    "gpu": "the GPU, for the plan (v100-32gb, a100-80gb, 24gib, …)",
    "launcher": "torchrun, srun, deepspeed, deepspeed-slurm or deepspeed-pdsh",
}
_NUMBERS: Final = {
    "nodes": "nodes",
    "gpus_per_node": "ranks of a node, each with its GPU",
    "cpus_per_node": "CPUs of a node, shared out among its tasks",
    "signal_lead": "seconds before the end at which the run is told to save",
    "array_tasks": "of a job array, how many run at the same time",
}


def add_slurm_commands(slurm: Commands) -> None:
    """Adds them to ``tridock slurm``; each sets ``action``, which gives the exit code."""
    render = slurm.add_parser("render", help="print the sbatch script, and contact nobody")
    _wish_options(render)
    render.set_defaults(action=_render)
    submit = slurm.add_parser("submit", help="check the plan and the site, submit; print the job and the run's folder")
    _wish_options(submit)
    submit.set_defaults(action=_submit)
    run = slurm.add_parser("run", help="inside an allocation (salloc): start at once, here")
    _wish_options(run)
    run.set_defaults(action=_run)

    status = slurm.add_parser("status", help="the runs that were submitted from here, and how far each is")
    _workspace_option(status)
    status.add_argument("--json", action="store_true", help="print a list of objects, for programs")
    status.set_defaults(action=_status)
    logs = slurm.add_parser("logs", help="what a run has printed")
    _which_run(logs)
    logs.add_argument("--rank", type=int, action="append", default=[], help="a rank's own log instead; again for more")
    logs.add_argument("--follow", action="store_true", help="go on until the job has ended")
    logs.set_defaults(action=_logs)
    cancel = slurm.add_parser("cancel", help="end a run's job, or take it out of the queue; nothing is saved")
    _which_run(cancel)
    cancel.set_defaults(action=_cancel)

    supervise = slurm.add_parser("supervise", help="what a job's script calls on its first node")
    supervise.add_argument("--config", type=Path, help="the experiment, where the folder has none yet")
    supervise.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of it")
    supervise.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of the ranks")
    supervise.add_argument("--no-requeue", action="store_true", help="do not have the job queued again")
    supervise.add_argument("folder", type=Path, help="the run's folder")
    supervise.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what starts all ranks")
    supervise.set_defaults(action=_supervise)


def _wish_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", type=Path, nargs="+", metavar="CONFIG", help="the experiment; several: a job array")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field: train.seed=7"
    )
    sweep = "a job array over the values of a field: optimizer.lr=1e-3,3e-4; again for all combinations"
    parser.add_argument("--sweep", action="append", default=[], metavar="FIELD=VALUES", help=sweep)
    parser.add_argument("--profile", type=Path, help="the site's part: configs/slurm/*.yaml")
    job = parser.add_argument_group("the job (over the profile's)")
    for names, kind in ((_NUMBERS, int), (_TEXTS, str)):
        for name, what in names.items():
            job.add_argument(f"--{name.replace('_', '-')}", type=kind, help=what)
    job.add_argument("--container", choices=("none", "apptainer", "pyxis", "docker"), help="what the ranks run in")
    job.add_argument("--image", help="its image: a .sif or .sqsh file, or a name")
    job.add_argument("--no-requeue", action="store_true", help="do not queue it again when its time is over")
    _workspace_option(parser)
    parser.add_argument("--force", action="store_true", help="even if the plan says that it does not fit the GPUs")


def _workspace_option(parser: argparse.ArgumentParser) -> None:
    text = "folder that holds data/ and runs/, on a file system that all nodes share (default: here)"
    parser.add_argument("--workspace", type=Path, default=Path(), help=text)


def _which_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="the run's id, or the job's (default: the newest)")
    _workspace_option(parser)


def _wish(arguments: argparse.Namespace) -> Wish:
    from tridock.ops.slurm.submit import Wish

    changes: dict[str, Any] = {
        name: value for name in (*_NUMBERS, *_TEXTS) if (value := getattr(arguments, name)) is not None
    }
    for option, field in (("container", "container.kind"), ("image", "container.image")):
        if getattr(arguments, option) is not None:
            changes[field] = getattr(arguments, option)
    if arguments.no_requeue:
        changes["requeue"] = False
    return Wish(
        arguments.configs,
        arguments.set,
        arguments.sweep,
        arguments.profile,
        changes,
        arguments.workspace,
        arguments.force,
    )


def _render(arguments: argparse.Namespace) -> int:
    from tridock.ops.slurm.submit import shown

    print(shown(_wish(arguments)), end="")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    from tridock.ops.slurm.submit import submit

    job = submit(_wish(arguments))
    print(f"job {job.job_id}")
    for folder in job.folders:
        print(f"run {folder.name}; folder {folder}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from tridock.ops.slurm.submit import run_in_allocation

    run_in_allocation(_wish(arguments))


def _status(arguments: argparse.Namespace) -> int:
    import json

    from tridock.ops.slurm.jobs import table

    rows = table(arguments.workspace)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console

    from tridock.ops.slurm.table import as_table

    Console(highlight=False).print(as_table(rows))
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    from tridock.ops.slurm.jobs import show_logs

    return show_logs(arguments.workspace, arguments.run, arguments.rank, follow=arguments.follow)


def _cancel(arguments: argparse.Namespace) -> int:
    from tridock.ops.slurm.jobs import cancel

    run = cancel(arguments.workspace, arguments.run)
    print(f"cancelled job {run.job_id}, run {run.folder.name}")
    return 0


def _supervise(arguments: argparse.Namespace) -> int:
    from tridock.ops.slurm.supervise import Job, supervise

    env = {name: value for name, _, value in (word.partition("=") for word in arguments.env)}
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    folder = arguments.folder.absolute()
    return supervise(Job(folder, argv, arguments.config, arguments.set, env, requeue=not arguments.no_requeue))
