"""``tridock resume``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.cli.launch import add_start, report_job, report_start, start, start_job
from tridock.cli.options import Arguments, Commands, add_command
from tridock.cli.output import say
from tridock.contracts import run_folder
from tridock.errors import ClusterError, Problem, RequestError

if TYPE_CHECKING:
    from tridock.ops.hosts.hosts import Hosts

_OF_HOSTS: Final = ("include", "exclude", "share", "queue", "verbose", "no_check")
_ON_A_CLUSTER: Final = (*_OF_HOSTS, "nodes", "slots", "detach", "dry_run")


def add(commands: Commands) -> None:
    examples = (
        "--hosts hostfile",
        "--hosts hostfile --run demo-3d-20261122-110613-14b7 --set train.train_iters=2000",
        "--run runs/demo-20261122-110613-14b7",
    )
    parser = add_command(commands, "resume", _resume, "continue a run from its newest checkpoint", *examples)
    parser.add_cluster()
    parser.add_run("run id, or run folder (runs/<run-id>); a folder continues on this machine unless --hosts is given")
    parser.add_set()
    parser.add_argument("--nproc", type=int, metavar="N", help="on this machine: ranks to start (default: as before)")
    parser.add_flag(
        "--force", "run even if the plan does not fit in GPU memory, or if somebody else started your own program"
    )
    parser.add_yes()
    add_start(parser, "print the plan, the command and the names of the run's files; start nothing")


def _resume(arguments: Arguments) -> int:
    """Continue a run that has stopped, failed, lost its nodes or come to its end, with changes, as a new run (under
    Slurm in a new job), from the newest checkpoint that is whole, wherever its nodes have the files. Your own program
    continues in its folder."""
    from tridock.experiment import is_command
    from tridock.ops.hosts.client import NodeClient
    from tridock.ops.runs.checkpoint_to_load import saved_in
    from tridock.ops.runs.prepare import prepare_on
    from tridock.ops.runs.resume import continuation, folder_on, on_slots

    named = arguments.named_run
    if arguments.hosts is None and named is not None:
        for folder in (Path(named), Path("runs") / named):
            if (folder / run_folder.JOB).is_file():
                return _resume_job(arguments, folder)
    if arguments.hosts is None and named is not None and ("/" in named or arguments.found_hostfile is None):
        return _resume_here(arguments, Path(named))
    if arguments.nproc is not None:
        raise RequestError(Problem("--nproc", "is for this machine", str(arguments.nproc), "give --nodes or --slots"))
    hosts = arguments.open_hosts(lambda cluster: cluster.first(arguments.nodes, arguments.slots))
    home = Path("runs") if named is None or "/" not in named else Path(named).parent
    with _or_without(hosts, arguments.include, arguments.exclude):
        folder = folder_on(hosts, None if named is None else Path(named).name, home)
        if not is_command(folder / run_folder.EXPERIMENT):

            def newest(load: str) -> int | None:
                with suppress(ClusterError):
                    client = NodeClient.of(hosts)
                    if set(client.running()) >= set(hosts.cluster.slots):  # else the ranks will tell
                        return saved_in(client, load).newest
                return None

            found = continuation(folder, arguments.set, arguments.confirm, newest=newest)
    if is_command(folder / run_folder.EXPERIMENT):
        return _resume_program(arguments, hosts, folder)
    cluster, found = on_slots(hosts.cluster, found, arguments.set, force=arguments.force)
    prepared = prepare_on(cluster, found.config, found.overrides, force=arguments.force)
    say(str(found))
    return start(arguments, hosts.within(cluster), prepared)


@contextmanager
def _or_without(hosts: Hosts, include: str = "", exclude: str = "") -> Iterator[None]:
    """Adds to the errors of hosts that do not answer, maybe for good, how an engine's run continues without them."""
    try:
        yield
    except ClusterError as error:
        lost = {it.where for it in error.problems if it.where in hosts.nodes and "does not answer" in it.what}
        if not lost or lost == set(hosts.nodes) or include:
            raise
        without = "@".join(filter(None, (exclude, *sorted(lost))))
        todo = f"or continue an engine's run without it: --exclude {shlex.quote(without)}"
        raise ClusterError(
            (replace(it, todo=f"{it.todo}; {todo}") if it.where in lost else it for it in error.problems),
            error.unaffected,
        ) from None


def _resume_program(arguments: Arguments, hosts: Hosts, folder: Path) -> int:
    from tridock.experiment import load_command
    from tridock.ops.hosts.client import NodeClient
    from tridock.ops.runs.launch import launch_again
    from tridock.ops.runs.recorded_run import confirm_run
    from tridock.ops.runs.resume import nodes_of_program

    what = "is your own program, which continues in its folder as it was started"
    _refuse(arguments, folder, ("set", "queue", "dry_run"), what, "leave it out, or begin anew: tridock run")
    supervision = nodes_of_program(hosts, folder)
    confirm_run(folder, arguments.confirm)
    experiment = load_command(folder / run_folder.EXPERIMENT)
    options = {"check": arguments.check, "share": arguments.share, "force": arguments.force}
    bundle, client = launch_again(NodeClient.of(hosts), folder.name, supervision, experiment, **options)
    arguments.note(f"run {folder.name}: {shlex.join(experiment.resume_command or experiment.command)}")
    return report_start(arguments, client, bundle)


def _resume_job(arguments: Arguments, folder: Path) -> int:
    """Continues a run of Slurm in another job: an engine's as a new run, your own program in its folder."""
    from tridock.experiment import is_command
    from tridock.ops.slurm.jobs import in_queue
    from tridock.ops.slurm.submit import resumed, submit_again

    _refuse(arguments, folder, ("nproc", *_OF_HOSTS), "continues in a job of Slurm", "leave it out, or give --hosts")
    workspace = folder.absolute().parent.parent
    if (job := in_queue(workspace).get(folder.name)) is not None:
        todo = f"wait for its end, or end it: tridock slurm cancel {job}"
        raise RequestError(Problem(str(folder), "is running or waits for nodes", f"job {job}", todo))
    if not is_command(folder / run_folder.EXPERIMENT):
        given = {"nodes": arguments.nodes, "gpus_per_node": arguments.slots}
        changes = {name: value for name, value in given.items() if value is not None}
        options = resumed(folder, arguments.set, changes, arguments.confirm)
        return start_job(arguments, replace(options, force=arguments.force))
    what = "is your own program, which continues in its folder as it was submitted"
    unused = ("set", "force", "nodes", "slots", "dry_run")
    _refuse(arguments, folder, unused, what, "leave it out, or begin anew: tridock run --slurm")
    return report_job(arguments, workspace, submit_again(folder, arguments.confirm))


def _refuse(arguments: Arguments, folder: Path, names: Iterable[str], what: str, todo: str) -> None:
    """Raises :class:`RequestError` if one of the options of these names is given."""
    given = {**vars(arguments), "no_check": not arguments.check}
    if unused := [f"--{name.replace('_', '-')}" for name in names if given[name]]:
        raise RequestError(Problem(str(folder), what, ", ".join(unused), todo))


def _resume_here(arguments: Arguments, folder: Path) -> int:
    from tridock.contracts.appends import printing_to_a_full_disk
    from tridock.contracts.records import read_plan
    from tridock.ops.runs.local_run import run_here
    from tridock.ops.runs.resume import continuation

    _refuse(arguments, folder, _ON_A_CLUSTER, "continues here, without a cluster", "give --hosts")
    found = continuation(folder, arguments.set, arguments.confirm)
    say(str(found))
    nproc = read_plan(folder)["world_size"] if arguments.nproc is None else arguments.nproc
    workspace, quiet = folder.resolve().parent.parent, arguments.quiet
    with printing_to_a_full_disk():
        options = {"force": arguments.force, "quiet": quiet}
        return run_here(found.config, nproc, workspace, found.overrides, arguments.run_id_file, **options).exit_code
