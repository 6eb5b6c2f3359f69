"""``tridock launch``, ``logs``, ``stop``, ``runs`` and ``fetch``: runs on a cluster."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.options import (
    Commands,
    add_cluster,
    add_command,
    add_config,
    add_quiet,
    add_run,
    add_set,
    config_of,
    hostfile_of,
    open_session,
    run_id_file,
    run_of,
)
from tridock.cli.output import console, print_tables, say
from tridock.contracts.run_folder import write_atomic
from tridock.errors import EXIT_INTERRUPTED, TridockError, count

if TYPE_CHECKING:
    from tridock.launchers.bundle import RunBundle
    from tridock.ops.hosts.session import Session
    from tridock.ops.runs.registry import Run
    from tridock.ops.slurm.submit import Submitted


def add(commands: Commands) -> None:
    examples: tuple[str, ...] = (
        "--hosts hostfile",
        "--hosts hostfile --config configs/demo-3d.yaml --set train.train_iters=100",
        "--hosts hostfile --config configs/demo-3d.yaml --dry-run",
    )
    parser = add_command(commands, "launch", _launch, "run an experiment on a cluster", *examples)
    add_cluster(parser)
    add_config(parser, "a small GPT on the demo data, in 3D if the number of slots allows it")
    add_set(parser)
    parser.add_argument("--force", action="store_true", help="run even if the plan does not fit in GPU memory")
    add_start(parser, "print the plan, the command and the names of the run's files; contact no host")

    examples = ("--hosts hostfile", "--hosts hostfile --rank 0,3", "--hosts hostfile --node host-b --follow")
    parser = add_command(commands, "logs", _logs, "follow a run, or print the logs of its ranks", *examples)
    add_cluster(parser)
    add_run(parser)
    text = "print the log of this rank, or of several (0,3), instead of the launcher's output"
    parser.add_argument("--rank", default="", metavar="N[,M]", help=text)
    text = "print the logs of all ranks of this node instead of the launcher's output"
    parser.add_argument("--node", default="", metavar="NODE", help=text)
    parser.add_argument("--follow", action="store_true", help="print new lines until the run ends")

    parser = add_command(commands, "stop", _stop, "stop a run on every node", "--hosts hostfile")
    add_cluster(parser)
    add_run(parser, default="the active run if there is only one")
    add_quiet(parser)

    parser = add_command(commands, "cancel", _cancel, "remove a run from the queue", "--hosts hostfile")
    add_cluster(parser)
    add_run(parser, default="the only queued run")
    add_quiet(parser)

    parser = add_command(commands, "runs", _runs, "list all runs, newest first", "--hosts hostfile --json")
    add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")

    examples = ("--hosts hostfile", "--hosts hostfile --checkpoints")
    parser = add_command(commands, "fetch", _fetch, "copy a run's folder into runs/", *examples)
    add_cluster(parser)
    add_run(parser)
    parser.add_argument("--checkpoints", action="store_true", help="fetch the checkpoints too")
    add_quiet(parser)


def add_start(parser: argparse.ArgumentParser, dry_run: str) -> None:
    """Adds the options of a run that starts on a cluster."""
    text = "run the doctor's quick checks first (default: true)"
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "use only the first N nodes"
    parser.add_argument("--nodes", type=int, metavar="N", help=text)
    parser.add_argument("--slots", type=int, metavar="N", help="use only the first N slots of each node")
    text = "start even if another run is using the same slots"
    parser.add_argument("--share", action="store_true", help=text)
    text = "queue the run if other runs are using its slots; it starts when they are free"
    parser.add_argument("--queue", action="store_true", help=text)
    parser.add_argument("--detach", action="store_true", help="start the run without following its output")
    parser.add_argument("--run-id-file", type=run_id_file, metavar="FILE", help="write the run id to this file")
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    text = "also print the output of DeepSpeed's launcher, as tridock logs does; with --dry-run, print every file"
    parser.add_argument("--verbose", action="store_true", help=text)
    add_quiet(parser)


def _launch(arguments: argparse.Namespace) -> int:
    """Run an experiment on the cluster and follow its output. Ctrl-C detaches, and the run continues."""
    first = lambda cluster: cluster.first(arguments.nodes, arguments.slots)  # noqa: E731
    session = open_session(arguments, first, ahead=not arguments.dry_run)
    from tridock.ops.doctor import ask_for_quick_reports
    from tridock.ops.runs import launch
    from tridock.ops.runs.default_experiment import choose_experiment
    from tridock.report.plan_output import headline, summary

    config, overrides, note = choose_experiment(config_of(arguments), arguments.set, session.cluster.slots)
    prepared = launch.prepare_on(session, config, overrides, force=arguments.force)
    if note and not arguments.quiet:
        say(note)
    if arguments.dry_run:
        console().print(summary(prepared.assessment))
        print_preview(launch.preview(session, prepared), verbose=arguments.verbose)
        return 0
    if arguments.check:
        ask_for_quick_reports(session)
    session.keeps_shells = True
    prepared = launch.on_hosts_gpus(session, prepared)
    if not arguments.quiet:
        console().print(headline(prepared.assessment))
    if note:  # the experiment reads the demo's data
        brought = launch.bring_demo_data(session)
        if not arguments.quiet:
            say(brought)
    bundle = launch.launch(session, prepared, check=arguments.check, share=arguments.share, queue=arguments.queue)
    if not arguments.quiet:
        plan = prepared.plan
        ranks, nodes = count(plan.world_size, "rank"), count(len(session.cluster.slots), "node")
        say(f"run {bundle.run_id}: {ranks} on {nodes}, {plan.layout}")
    return report_start(arguments, session, bundle)


def report_start(arguments: argparse.Namespace, session: Session, bundle: RunBundle) -> int:
    """Follows a run that has started, or returns at once if detached; returns the exit code."""
    from tridock.ops.runs.registry import Run

    if arguments.run_id_file:
        write_atomic(arguments.run_id_file, f"{bundle.run_id}\n".encode())
    if arguments.quiet:
        say(bundle.run_id)
    if bundle.waits_for is not None:
        if not arguments.quiet:
            say(_queue_message(arguments, session, bundle))
        return 0
    if arguments.detach:
        if not arguments.quiet:
            say(_return_message(arguments, bundle.run_id))
        return 0
    run = Run(bundle.run_id, session.head)
    return follow(arguments, session, run, quiet=arguments.quiet, steps=arguments.verbose)


def _queue_message(arguments: argparse.Namespace, session: Session, bundle: RunBundle) -> str:
    from tridock.ops.runs.registry import list_runs, until

    now = datetime.now(UTC)
    ends = {run.run_id: until(run, now) for run in list_runs(session)}
    waits = "; ".join(f"{name}{ends.get(name, '')}" for name in bundle.waits_for or ()) or "its slots"
    options = f"--hosts {shlex.quote(str(hostfile_of(arguments)))}"
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


def follow(
    arguments: argparse.Namespace, session: Session, run: Run, *, quiet: bool = False, steps: bool = True
) -> int:
    """Prints the run's output to its end; returns its exit code. Raises :class:`RunError` if the run failed.

    ``steps``: includes DeepSpeed's launcher's log of its own steps.
    """
    from tridock.ops.runs.logs import follow as follow_output
    from tridock.ops.runs.registry import folder_of

    chunks: Iterable[bytes] = (stream := follow_output(session, run))
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

        check_exit(session, run, stream.exit_code)
    if not quiet:
        say(f"run {run.run_id} is done; its folder is {folder_of(session, run)}")
    return 0


def _return_message(arguments: argparse.Namespace, run_id: str) -> str:
    options = f"--hosts {shlex.quote(str(hostfile_of(arguments)))} --run {run_id}"
    return f"Come back with: {arguments.program} logs {options}\nStop it with:   {arguments.program} stop {options}"


def reachable(session: Session) -> tuple[Session, TridockError | None]:
    """Returns a session with the hosts that answer and the error of the others. Raises if no host answers."""
    from tridock.ops.runs.registry import ask_for_runs

    ask_for_runs(session)
    session.reads_keys = False
    there, failure = session.reachable()
    if failure is not None:
        if not there.nodes:
            raise failure
        print(failure, file=sys.stderr)
    return there, failure


def _logs(arguments: argparse.Namespace) -> int:
    """Follow a run's output, or print the logs of ranks or of a node."""
    session = open_session(arguments, ahead=True)
    from tridock.ops.runs.logs import choose_ranks, read_rank_logs
    from tridock.ops.runs.registry import choose_run

    session = reachable(session)[0]
    run = choose_run(session, run_of(arguments), active=False)
    if not arguments.rank and not arguments.node:
        return follow(arguments, session, run)
    ranks = choose_ranks(session, run, arguments.rank, arguments.node)
    for part in read_rank_logs(session, run, ranks, follow=arguments.follow):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    """Stop one run on every node. Other runs continue."""
    session = open_session(arguments, ahead=True)
    from tridock.ops.runs.registry import choose_run, stop

    session.keeps_shells = True
    session, failure = reachable(session)

    run = choose_run(session, run_of(arguments), active=True)
    nodes = stop(session, run)
    if not arguments.quiet:
        say(f"stopped {run.run_id} on {', '.join(nodes)}")
    if failure is not None:
        say("a node that has lost the head ends its processes of the run by itself")
        return failure.exit_code
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    """Remove a run from the queue. Runs that have started continue."""
    from tridock.ops.runs.registry import cancel

    run_id = cancel(open_session(arguments), run_of(arguments))
    if not arguments.quiet:
        say(f"removed {run_id} from the queue")
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    """List all runs with their state, newest first."""
    session = open_session(arguments, ahead=True)
    from tridock.ops.runs.registry import ask_for_runs, list_runs
    from tridock.report.run_tables import history_table

    ask_for_runs(session)
    session.reads_keys = False
    session, failure = session.reachable()
    listed = list_runs(session)[::-1] if session.nodes else []
    if arguments.json:
        say(json.dumps([asdict(run) for run in listed], indent=2))
    else:
        print_tables(history_table(listed))
    if failure is not None:
        print(failure, file=sys.stderr)
        return failure.exit_code
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    """Copy a run's folder from the cluster into runs/."""
    from tridock.ops.runs.fetch import fetch
    from tridock.ops.runs.registry import choose_run

    session = open_session(arguments)
    run = choose_run(session, run_of(arguments), active=False)
    say(str(fetch(session, run, Path("runs"), checkpoints=arguments.checkpoints)))
    return 0


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
