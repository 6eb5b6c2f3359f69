"""``tridock run``: the user's own program on a cluster."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.launch import add_start, print_preview, report_start, start_job
from tridock.cli.options import Arguments, Commands, add_command
from tridock.errors import Problem, RequestError, count

if TYPE_CHECKING:
    from tridock.cluster.settings import Cluster
    from tridock.experiment.command import CommandExperiment


def add(commands: Commands) -> None:
    examples = (
        "--hosts hostfile -- torchrun train.py --epochs 3",
        "--hosts hostfile --workdir ~/nanoGPT --env WANDB_MODE=offline -- torchrun train.py config/train_gpt2.py",
        "--hosts hostfile --restarts 3 -- deepspeed train.py --deepspeed_config ds.json",
        "--hosts hostfile --dry-run -- mpirun ./a.out",
        "--slurm site.yaml --nodes 2 -- torchrun train.py --epochs 3",
    )
    parser = add_command(commands, "run", _run, "run your own program on a cluster", *examples)
    parser.add_cluster()
    text = "site profile of a Slurm cluster (docs/guides/slurm.md): run the program in a job there, not on --hosts"
    parser.add_argument("--slurm", type=Path, metavar="PROFILE", help=text)
    text = "YAML file with `engine: command` and the program (docs/guides/any-script.md), instead of PROGRAM"
    parser.add_argument("--config", type=Path, metavar="CONFIG", help=text)
    text = "folder to copy to every node and to run the program in (default: .)"
    parser.add_argument("--workdir", metavar="DIR", help=text)
    text = "environment variable of every rank; repeatable"
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "shell command that every node runs first, in that folder, e.g. 'pip install -r requirements.txt'"
    parser.add_argument("--setup", metavar="COMMAND", help=text)
    parser.add_argument("--name", help="first part of the run id (default: the script's name)")
    parser.add_argument("--restarts", type=int, metavar="N", help="restart a failed run up to N times (default: 0)")
    text = "command line for restarts, as one argument (default: the original command line)"
    parser.add_argument("--resume-command", metavar="COMMAND", help=text)
    text = (
        "how often to start a program that is not a launcher: once per slot (default); once per node if it starts the"
    )
    text += " node's ranks itself, e.g. a script with torchrun; once per cluster if it starts all ranks from the head"
    parser.add_argument("--per", choices=("slot", "node", "cluster"), help=text)
    text = "how the program prints its losses: hf-trainer, lightning, megatron, key=value, or a regular expression"
    parser.add_argument(
        "--metrics", metavar="PATTERN", help=text + " with groups, e.g. 'iter (?P<iteration>\\d+): loss (?P<loss>\\S+)'"
    )
    text = "node image, instead of the cluster's; wrapped first if it lacks Tridock's layer"
    parser.add_argument("--image", metavar="NAME", help=text)
    add_start(parser, "print the command, and the names of the run's files; contact no host")
    text = "torchrun, deepspeed, `accelerate launch` or mpirun with script and arguments, or any other program,"
    text += " which is started once per slot"
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help=text)


def _run(arguments: Arguments) -> int:
    """Run your own program on the cluster and follow its output. Ctrl-C detaches, and the run continues.

    Tridock copies the folder to every node, adds the nodes, ranks and rendezvous to the command line, and watches the
    ranks.
    """
    if arguments.slurm is not None:
        return _run_under_slurm(arguments)
    hosts = arguments.open_hosts(lambda cluster: _cluster(arguments, cluster))
    from tridock.launchers.ssh import Ssh
    from tridock.ops.hosts.client import NodeClient
    from tridock.ops.runs.code import read_code
    from tridock.ops.runs.launch import launch, preview
    from tridock.ops.runs.prepared import prepare_command
    from tridock.ops.runs.trackers import with_cluster_trackers

    experiment = with_cluster_trackers(_experiment(arguments), hosts.cluster.settings)
    files, slots = read_code(_code_folder(arguments) / experiment.code), hosts.cluster.slots
    if files.note:
        arguments.note(files.note)
    prepared = prepare_command(experiment, files, slots, Ssh())
    if arguments.dry_run:
        print_preview(preview(hosts.cluster, prepared), verbose=arguments.verbose)
        return 0
    options = {"check": arguments.check, "share": arguments.share, "queue": arguments.queue}
    bundle, client = launch(NodeClient.of(hosts), prepared, **options)
    what = f"{count(sum(map(len, slots.values())), 'slot')} on {count(len(slots), 'node')}"
    code = f"{files.number} of {files.folder.resolve()}"
    arguments.note(f"run {bundle.run_id}: {shlex.join(experiment.command)}; {what}, {code}")
    return report_start(arguments, client, bundle)


def _run_under_slurm(arguments: Arguments) -> int:
    from tridock.ops.slurm.submit import SubmitOptions

    given = {"--hosts": arguments.hosts, "--share": arguments.share, "--queue": arguments.queue}
    given |= {"--include": arguments.include, "--exclude": arguments.exclude}
    if unused := [option for option, value in given.items() if value]:
        todo = "leave it out: Slurm chooses the nodes, and jobs wait for them"
        raise RequestError(Problem("--slurm", "cannot be combined with these options", ", ".join(unused), todo))
    changes = {"nodes": arguments.nodes, "gpus_per_node": arguments.slots, "container.image": arguments.image}
    options = SubmitOptions(
        (),
        profile=arguments.slurm,
        changes={name: value for name, value in changes.items() if value is not None},
        program=(_experiment(arguments), _code_folder(arguments)),
    )
    return start_job(arguments, options)


def _code_folder(arguments: Arguments) -> Path:
    """Returns the folder that the experiment's ``code`` is relative to."""
    return arguments.config.parent if arguments.config and arguments.workdir is None else Path()


def _cluster(arguments: Arguments, cluster: Cluster) -> Cluster:
    if (image := arguments.image) is not None:
        from tridock.cluster.schema import IMAGE_NAME
        from tridock.ops.image.wrap import has_layer

        if not re.fullmatch(IMAGE_NAME, image):
            raise RequestError(Problem("--image", "is not the name of an image", repr(image), "write name:tag"))
        cluster = cluster.with_image(image, wrap=not has_layer(image))
    return cluster.first(arguments.nodes, arguments.slots)


def _experiment(arguments: Arguments) -> CommandExperiment:
    """Returns the experiment from the file or the options; options override fields of the file."""
    from tridock.experiment import load_command
    from tridock.experiment.command import ENGINE, CommandExperiment, name_of
    from tridock.strict_yaml import validated

    program = arguments.command_line[1:] if arguments.command_line[:1] == ["--"] else arguments.command_line
    if bool(program) == (arguments.config is not None):
        got, todo = ("both" if program else ""), "write it after --, as in: tridock run -- torchrun train.py"
        raise RequestError(Problem("PROGRAM", "or --config must name the program, but not both", got, todo))
    fields = {} if arguments.config is None else load_command(arguments.config).model_dump(mode="json")
    if program:
        fields = {"name": name_of(tuple(program)), "engine": ENGINE, "command": program}
    given = {"name": arguments.name, "code": arguments.workdir, "setup": arguments.setup, "metrics": arguments.metrics}
    given |= {"per": arguments.per}
    fields |= {name: value for name, value in given.items() if value is not None}
    if arguments.resume_command is not None:
        fields["resume_command"] = _split(arguments.resume_command)
    if arguments.restarts is not None:
        fields["restart"] = {**fields.get("restart", {}), "max": arguments.restarts}
    fields["env"] = {**fields.get("env", {}), **dict(map(_variable, arguments.env))}
    return validated(CommandExperiment, fields, str(arguments.config or "tridock run"))


def _split(text: str) -> list[str]:
    with RequestError.in_place_of(ValueError, "--resume-command", "is not a valid command line", "close the quote"):
        return shlex.split(text)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(Problem("--env", "must be a name, =, and a value", repr(text), "write NAME=VALUE"))
    return name, value
