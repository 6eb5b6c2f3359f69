"""``tridock launch``, ``logs``, ``stop`` and ``fetch``: runs on a cluster."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.options import Arguments, Commands, Parser, add_command, run_id_file
from tridock.cli.output import console, print_json, say
from tridock.contracts.run_folder import write_atomic
from tridock.errors import EXIT_INTERRUPTED, TridockError, count

if TYPE_CHECKING:
    from tridock.launchers.run import RunBundle
    from tridock.ops.hosts.client import NodeClient
    from tridock.ops.hosts.hosts import Hosts
    from tridock.ops.runs.cluster_runs import Run
    from tridock.ops.runs.prepare import Planned
    from tridock.ops.slurm.submit import SubmitOptions, Submitted


def add(commands: Commands) -> None:
    examples: tuple[str, ...] = (
        "--hosts hostfile",
        "--hosts hostfile --config configs/demo-3d.yaml --set train.train_iters=100",
        "--hosts hostfile --config configs/demo-3d.yaml --dry-run",
    )
    parser = add_command(commands, "launch", _launch, "run an experiment on a cluster", *examples)
    parser.add_cluster()
    parser.add_config("a small GPT on the demo data, in 3D if the number of slots allows it")
    parser.add_set()
    parser.add_flag("--force", "run even if the plan does not fit in GPU memory")
    add_start(parser, "print the plan, the command and the names of the run's files; contact no host")

    examples = ("--hosts hostfile", "--hosts hostfile --rank 0,3", "--hosts hostfile --node host-b --follow")
    parser = add_command(commands, "logs", _logs, "follow a run, or print the logs of its ranks", *examples)
    parser.add_cluster()
    parser.add_run()
    text = "print the log of this rank, or of several (0,3), instead of the launcher's output"
    parser.add_argument("--rank", default="", metavar="N[,M]", help=text)
    text = "print the logs of all ranks of this node instead of the launcher's output"
    parser.add_argument("--node", default="", metavar="NODE", help=text)
    parser.add_flag("--follow", "print new lines until the run ends")

    parser = add_command(commands, "stop", _stop, "stop a run on every node", "--hosts hostfile")
    parser.add_cluster()
    parser.add_run(default="the active run if there is only one")
    _add_force(parser)

    parser = add_command(commands, "cancel", _cancel, "remove a run from the queue", "--hosts hostfile")
    parser.add_cluster()
    parser.add_run(default="the only queued run")
    _add_force(parser)

    examples = ("--hosts hostfile", "--hosts hostfile --checkpoints")
    parser = add_command(commands, "fetch", _fetch, "copy a run's folder into runs/", *examples)
    parser.add_cluster()
    parser.add_run()
    parser.add_flag("--checkpoints", "fetch the checkpoints too, each brought together from the nodes")
    parser.add_flag("--json", "print the run and its folder here as JSON")
    parser.add_quiet()


def _add_force(parser: Parser) -> None:
    parser.add_flag("--force", "even if somebody else has started the run")
    parser.add_quiet()


def add_start(parser: Parser, dry_run: str) -> None:
    text = "run the doctor's quick checks first (default: true)"
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help=text)
    parser.add_argument("--nodes", type=int, metavar="N", help="use only the first N nodes")
    parser.add_argument("--slots", type=int, metavar="N", help="use only the first N slots of each node")
    parser.add_flag("--share", "start even if another run is using the same slots")
    parser.add_flag("--queue", "queue the run if other runs are using its slots; it starts when they are free")
    parser.add_flag("--detach", "start the run without following its output")
    parser.add_argument("--run-id-file", type=run_id_file, metavar="FILE", help="write the run id to this file")
    parser.add_flag("--dry-run", dry_run)
    text = "also print the output of DeepSpeed's launcher, as tridock logs does; with --dry-run, print every file"
    parser.add_flag("--verbose", text)
    parser.add_quiet()


def _launch(arguments: Arguments) -> int:
    """Run an experiment on the cluster and follow its output. Ctrl-C detaches, and the run continues."""
    hosts = arguments.open_hosts(lambda cluster: cluster.first(arguments.nodes, arguments.slots))
    from tridock.ops.runs.default_experiment import choose_experiment
    from tridock.ops.runs.demo_data import bring_demo_data
    from tridock.ops.runs.prepare import prepare_on

    config, overrides, note = choose_experiment(arguments.named_config, arguments.set, hosts.cluster.slots)
    prepared = prepare_on(hosts.cluster, config, overrides, force=arguments.force)
    if note:
        arguments.note(note)

    def bring(client: NodeClient) -> NodeClient:
        brought, client = bring_demo_data(client)
        arguments.note(brought)
        return client

    return start(arguments, hosts, prepared, bring if note else None)  # with a note it reads the demo's data


def start(
    arguments: Arguments, hosts: Hosts, prepared: Planned, bring: Callable[[NodeClient], NodeClient] | None = None
) -> int:
    """Starts a run, or shows it; ``bring`` is called with the nodes before it starts."""
    from tridock.ops.hosts.client import NodeClient
    from tridock.ops.runs.launch import launch, preview
    from tridock.ops.runs.prepare import on_hosts_gpus
    from tridock.report.plan_output import headline, summary

    if arguments.dry_run:
        console().print(summary(prepared.assessment))
        print_preview(preview(hosts.cluster, prepared), verbose=arguments.verbose)
        return 0
    client = NodeClient.of(hosts)
    prepared = on_hosts_gpus(client.states, prepared)
    if not arguments.quiet:
        console().print(headline(prepared.assessment))
    if bring is not None:
        client = bring(client)
    options = {"check": arguments.check, "share": arguments.share, "queue": arguments.queue}
    bundle, client = launch(client, prepared, **options)
    ranks, nodes = count(prepared.plan.world_size, "rank"), count(len(hosts.cluster.slots), "node")
    arguments.note(f"run {bundle.run_id}: {ranks} on {nodes}, {prepared.plan.layout}")
    return report_start(arguments, client, bundle)


def report_start(arguments: Arguments, client: NodeClient, bundle: RunBundle) -> int:
    """Follows a run that has started, or returns at once if detached; returns the exit code."""
    from tridock.ops.runs.cluster_runs import Run

    if arguments.run_id_file:
        write_atomic(arguments.run_id_file, f"{bundle.run_id}\n".encode())
    if arguments.quiet:
        say(bundle.run_id)
    arguments.note(bundle.supervision.hang_limit)
    if bundle.waits_for is not None:
        if not arguments.quiet:
            say(_queue_message(arguments, client, bundle))
        return 0
    if arguments.detach:
        arguments.note(_return_message(arguments, bundle.run_id))
        return 0
    run = Run(bundle.run_id, client.head)
    return follow(arguments, client, run, quiet=arguments.quiet, steps=arguments.verbose)


def _queue_message(arguments: Arguments, client: NodeClient, bundle: RunBundle) -> str:
    from tridock.ops.runs.cluster_runs import list_runs, until

    now = datetime.now(UTC)
    ends = {run.run_id: until(run, now) for run in list_runs(client)}
    waits = "; ".join(f"{name}{ends.get(name, '')}" for name in bundle.waits_for or ()) or "its slots"
    options = f"--hosts {shlex.quote(str(arguments.hostfile))}"
    return (
        f"queued: it waits for {waits}\nSee the queue with: {arguments.program} status {options}\n"
        f"Remove it with:     {arguments.program} cancel {options} --run {bundle.run_id}"
    )


def print_preview(bundle: RunBundle, *, verbose: bool) -> None:
    """Prints the command of a run, and with ``verbose`` every file of its folder."""
    say(f"\n# on the head, in {bundle.path}:\n{bundle.command}")
    if verbose:
        for name, content in bundle.files.items():
            say(f"\n# {name}\n{content.decode()}".rstrip())
    else:
        say(f"\n# files of the run (--verbose prints them): {', '.join(bundle.files)}")


def follow(arguments: Arguments, client: NodeClient, run: Run, *, quiet: bool = False, steps: bool = True) -> int:
    """Prints the run's output to its end; returns its exit code. Raises :class:`RunError` if the run failed.

    ``steps``: includes DeepSpeed's launcher's log of its own steps.
    """
    from tridock.ops.runs.cluster_runs import folder_of
    from tridock.ops.runs.logs import follow as follow_output

    chunks: Iterable[bytes] = (stream := follow_output(client, run))
    try:
        if not steps:
            from tridock.launchers.deepspeed import without_steps

            chunks = without_steps(stream)
        for chunk in chunks:
            if not quiet:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        say(f"\ndetached: run {run.run_id} continues. {_return_message(arguments, run.run_id)}")
        return EXIT_INTERRUPTED
    if stream.exit_code:
        from tridock.ops.runs.triage import check_exit

        check_exit(client, run, stream.exit_code)
    if not quiet:
        say(f"run {run.run_id} is done; its folder is {folder_of(client, run)}")
    return 0


def _return_message(arguments: Arguments, run_id: str) -> str:
    options = f"--hosts {shlex.quote(str(arguments.hostfile))} --run {run_id}"
    return f"Come back with: {arguments.program} logs {options}\nStop it with:   {arguments.program} stop {options}"


def reachable(arguments: Arguments) -> tuple[NodeClient, TridockError | None]:
    """Returns a client of the hosts that answer, and the error of the others. Raises if no host answers."""
    from tridock.ops.hosts.client import reachable as reachable_of

    client, failure = reachable_of(arguments.open_hosts())
    if failure is not None:
        if not client.hosts:
            raise failure
        print(failure, file=sys.stderr)
    return client, failure


def _logs(arguments: Arguments) -> int:
    """Follow a run's output, or print the logs of ranks or of a node."""
    client, _ = reachable(arguments)
    from tridock.ops.runs.cluster_runs import choose_run
    from tridock.ops.runs.logs import choose_ranks, read_rank_logs

    run = choose_run(client, arguments.named_run, active=False)
    if not arguments.rank and not arguments.node:
        return follow(arguments, client, run)
    ranks = choose_ranks(client, run, arguments.rank, arguments.node)
    for part in read_rank_logs(client, run, ranks, follow=arguments.follow):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
    return 0


def _stop(arguments: Arguments) -> int:
    """Stop one run on every node. Other runs continue."""
    client, failure = reachable(arguments)
    from tridock.ops.runs.cluster_runs import choose_run, refuse_others, stop

    run = choose_run(client, arguments.named_run, active=True)
    if not arguments.force:
        refuse_others([run])
    nodes = stop(client, run)
    arguments.note(f"stopped {run.run_id} on {', '.join(nodes)}")
    if run.elsewhere:
        say(f"{', '.join(run.elsewhere)}: not in the hostfile; the run's supervisor ends it there too, within seconds")
    if failure is not None:
        say("a node that has lost the head ends its processes of the run by itself")
        return failure.exit_code
    return 0


def _cancel(arguments: Arguments) -> int:
    """Remove a run from the queue. Runs that have started continue."""
    from tridock.ops.runs.cluster_runs import cancel

    run_id = cancel(arguments.open_client(), arguments.named_run, force=arguments.force)
    arguments.note(f"removed {run_id} from the queue")
    return 0


def _fetch(arguments: Arguments) -> int:
    """Copy a run's folder from the cluster into runs/."""
    from tridock.ops.runs.cluster_runs import choose_run
    from tridock.ops.runs.fetch import fetch

    client = arguments.open_client()
    run = choose_run(client, arguments.named_run, active=False)
    folder = fetch(client, run, Path("runs"), checkpoints=arguments.checkpoints)
    if arguments.json:
        print_json(run_id=run.run_id, folder=str(folder))
    else:
        say(str(folder))
    return 0


def start_job(arguments: Arguments, options: SubmitOptions) -> int:
    """Submits a job of one run and follows it, or shows its script; returns the exit code."""
    from tridock.ops.slurm.submit import render_script, submit

    if arguments.dry_run:
        print(render_script(options), end="")
        return 0
    job = submit(options, lambda line: None if arguments.quiet else print(line, file=sys.stderr))
    return report_job(arguments, options.workspace, job)


def report_job(arguments: Arguments, workspace: Path, job: Submitted) -> int:
    """Names a job that was submitted, and follows it unless detached; returns the exit code."""
    (folder,) = job.folders
    if arguments.run_id_file:
        write_atomic(arguments.run_id_file, f"{folder.name}\n".encode())
    say(folder.name if arguments.quiet else f"job {job.job_id}\nrun {folder.name}; folder {folder}")
    return 0 if arguments.detach else follow_job(workspace, job)


def follow_job(workspace: Path, job: Submitted) -> int:
    """Follows a Slurm job's output until it ends; returns the run's exit code. Raises triage's error if it fails."""
    from tridock.contracts.run_state import RunState
    from tridock.ops.runs.local_run import triage_here
    from tridock.ops.slurm.jobs import show_logs

    (folder,) = job.folders
    try:
        code = show_logs(workspace, folder.name, (), follow=True)
    except KeyboardInterrupt:
        logs, cancel = (f"tridock slurm {verb} {job.job_id}" for verb in ("logs --follow", "cancel"))
        say(f"\ndetached: job {job.job_id} continues. Come back with: {logs}\nStop it with:   {cancel}")
        return EXIT_INTERRUPTED
    if RunState.of_exit_code(code).has_failed:
        raise triage_here(folder)
    return code
