"""``tridock report``, ``reproduce``, ``triage`` and ``replan``: what reads runs, here or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cli.launch import follow, follow_job, reachable
from tridock.cli.options import Arguments, Commands, add_command, output_file
from tridock.cli.output import all_to_stderr, print_json, print_tables, problem_documents, say
from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError, RunError

if TYPE_CHECKING:
    from tridock.differences import Difference
    from tridock.ops.runs.triage import RunFailedError
    from tridock.reproduction.original import Original
    from tridock.reproduction.outcome import Outcome


def add(commands: Commands) -> None:
    which = "run id, or run folder (runs/<run-id>)"
    examples: tuple[str, ...] = ("runs/demo-3d-20261122-110613-14b7", "--hosts hostfile", "runs/a runs/b -o both.html")
    parser = add_command(commands, "report", _report, "summarize runs: a table, a loss curve, an HTML page", *examples)
    parser.add_run(which, several=True)
    parser.add_cluster()
    text = "file for the loss curve (default: loss.png in the run folder)"
    parser.add_argument("--png", type=output_file, metavar="FILE", help=text)
    text = (
        "write one HTML page, and its charts as PNG files"
        " (default for runs of a cluster: report.html in the folder of the first)"
    )
    parser.add_argument("-o", "--output", type=output_file, metavar="FILE.html", help=text)
    text = "add a Megatron log to the page; repeatable"
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help=text)
    parser.add_flag("--json", "print the figures of the runs as JSON, without a curve or a page")

    examples = ("--run runs/demo-3d-20261122-110613-14b7", "--hosts hostfile --run demo-3d-20261122-110613-14b7")
    parser = add_command(commands, "reproduce", _reproduce, "repeat a run and compare the losses", *examples)
    parser.add_run(f"{which}; a folder runs on this machine unless --hosts is given")
    parser.add_cluster()
    parser.add_workspace()
    text = "compare with this existing run instead of repeating RUN"
    parser.add_argument("--against", type=Path, metavar="RUN", help=text)
    text = (
        "allowed loss difference, relative to max(1, abs(loss))"
        " (default: 0 on CPUs; on GPUs 1e-4 in fp32, otherwise 1e-2)"
    )
    parser.add_argument("--tolerance", type=float, help=text)
    parser.add_flag("--force", "repeat the run even if the data, the GPUs or the number of slots have changed")
    parser.add_yes()
    text = "print the comparison as JSON; null if there is none: no losses, or a new run that failed here"
    parser.add_flag("--json", text)

    examples = ("--hosts hostfile", "--run runs/demo-3d-20261122-110613-14b7")
    parser = add_command(commands, "triage", _triage, "explain why a run failed", *examples)
    parser.add_run(which, "the last failed run")
    parser.add_cluster()
    parser.add_flag("--json", "print the first failure, its cause and remedy as JSON; null for a run that did not fail")

    example = "runs/demo-3d-20261122-110613-14b7 --without host-b"
    parser = add_command(commands, "replan", _replan, "show how a run continues after it loses nodes", example)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder: runs/<run-id>")
    parser.add_argument("--without", action="append", default=[], metavar="NODE", help="lost node; repeatable")
    text = "spare node that may replace a lost one; repeatable"
    parser.add_argument("--spare", action="append", default=[], metavar="NODE", help=text)
    parser.add_argument("--head", metavar="NODE", help="new head of the run (default: its head)")
    parser.add_flag("--from-scratch", "start from the beginning, not from a checkpoint")
    parser.add_flag("--json", "print the new plan and the run's new files as JSON")


def _report(arguments: Arguments) -> int:
    """Print a table about one run and draw its loss curve, or write one HTML page about several runs and logs. Runs of
    a cluster are fetched first."""
    given = {"-o": arguments.output, "--png": arguments.png, "--log": arguments.log}
    if arguments.json and (unused := [option for option, value in given.items() if value]):
        what = "does not go with these options"
        raise RequestError(Problem("--json", what, ", ".join(unused), "leave them out; it draws nothing"))
    folders, fetched = _folders(arguments)
    if arguments.json:
        return _print_figures(folders)
    if fetched:
        arguments.output = arguments.output or folders[0] / run_folder.REPORT
    if arguments.output is not None:
        return _page(arguments, folders)
    if arguments.log or len(folders) > 1:
        todo = "name the HTML page: -o report.html"
        raise RequestError(Problem("-o", "is required for several runs, and for logs", "", todo))
    if not folders:
        todo = "give runs/<run-id>, a Megatron log with --log, or a cluster with --hosts"
        raise RequestError(Problem("--run", "is missing", "", todo))

    from tridock.report.charts import plot_loss
    from tridock.report.subject import of_run
    from tridock.report.summary import render_table

    run = folders[0]
    png = arguments.png or run / run_folder.LOSS_CURVE
    subject = of_run(run)
    print_tables(render_table(f"Run {subject.name}", subject.rows))
    if subject.summary is not None or len(subject.columns):
        plot_loss(subject, png)
        print(f"loss curve  {png}")
    else:
        say("no losses: tridock run --metrics reads them from the program's output")
    print(f"run folder  {run}")
    return 0


def _print_figures(folders: Sequence[Path]) -> int:
    from tridock.report.subject import of_run

    if not folders:
        raise RequestError(Problem("--run", "is missing", "", "give runs/<run-id>, or a cluster with --hosts"))
    subjects = [of_run(folder) for folder in folders]
    figures = [summary for it in subjects if (summary := it.summary or it.program_summary) is not None]
    print_json(runs=[{"folder": it.source, **asdict(own)} for it, own in zip(subjects, figures, strict=True)])
    return 0


def _folders(arguments: Arguments) -> tuple[list[Path], bool]:
    """Returns the folders of the runs and whether any was fetched. On a cluster the default is the last run."""
    runs: list[str | None] = [*arguments.run]
    if not runs and not arguments.log and arguments.found_hostfile is not None:
        runs = [None]
    if all(run is not None and arguments.is_run_folder(run) for run in runs):
        return [Path(run) for run in arguments.run], False
    client = arguments.open_client()

    from tridock.ops.runs.cluster_runs import choose_run
    from tridock.ops.runs.fetch import fetch

    def folder_of(run: str | None) -> Path:
        if run is not None and arguments.is_run_folder(run):
            return Path(run)
        return fetch(client, choose_run(client, run, active=False), Path("runs"))

    return [folder_of(run) for run in runs], True


def _page(arguments: Arguments, folders: Sequence[Path]) -> int:
    from tridock.report.page import write_report

    if arguments.png is not None:
        todo = "leave it out: the page's charts are written beside it as <page>-loss.png and so on"
        raise RequestError(Problem("--png", "does not go with -o", str(arguments.png), todo))
    page, *charts = write_report(folders, arguments.log, arguments.output)
    print(f"page        {page}")
    for chart in charts:
        print(f"chart       {chart}")
    return 0


def _reproduce(arguments: Arguments) -> int:
    """Repeat a run from its folder, and compare environment and losses with the original. The exit code is 4 if the
    losses differ."""
    from tridock.ops.runs.reproduce import check_tolerance, compare_with, reproduce_here
    from tridock.report.run_tables import verdict_table

    run = arguments.named_run
    check_tolerance(arguments.tolerance)
    if arguments.against is not None and run is None:
        raise RequestError(Problem("--run", "is missing", "", "give the folder of the first run: runs/<run-id>"))

    def repeated() -> tuple[Outcome | None, int]:
        if run is not None and arguments.against is not None:
            return compare_with(Path(run), arguments.against, _print_environment, arguments.tolerance), 0
        if run is not None and arguments.hosts is None and _is_slurms_program(Path(run)):
            return _reproduce_under_slurm(arguments, Path(run))
        if run is not None and arguments.is_run_folder(run) and arguments.hosts is None:
            options = {"tolerance": arguments.tolerance, "force": arguments.force}
            return reproduce_here(Path(run), arguments.workspace, _print_environment, arguments.confirm, **options)
        return _reproduce_on_cluster(arguments, run)

    with all_to_stderr(when=arguments.json):
        outcome, code = repeated()
    if arguments.json:
        print_json(reproduction=None if outcome is None else outcome.document())
    elif outcome is not None:
        print_tables(verdict_table(outcome))
        print(f"written to  {run_folder.REPRODUCTION} in the folder of {outcome.now}")
    return RunError.exit_code if outcome is not None and outcome.verdict == "different" else code


def _reproduce_on_cluster(arguments: Arguments, run: str | None) -> tuple[Outcome | None, int]:
    from tridock.ops.runs import cluster_runs, reproduce_remote
    from tridock.ops.runs.fetch import newest_copy

    hosts = arguments.open_hosts()
    home = Path("runs") if run is None or "/" not in run else Path(run).parent
    original = newest_copy(hosts, None if run is None else Path(run).name, home)
    options = {"chosen": bool(arguments.include or arguments.exclude), "force": arguments.force}
    bundle, client, gate = reproduce_remote.start(hosts, original, _print_environment, arguments.confirm, **options)
    again = cluster_runs.Run(bundle.run_id, client.head)
    say(f"run {bundle.run_id}: repeats {original.name}")
    if (code := follow(arguments, client, again)) or not _has_losses(gate.original):
        return None, code
    return reproduce_remote.finish(client, again, gate, home, arguments.tolerance), 0


def _has_losses(original: Original) -> bool:
    if not original.metrics[0]:
        say("its losses are not compared: the original has none (docs/guides/any-script.md, Losses)")
    return bool(original.metrics[0])


def _is_slurms_program(run: Path) -> bool:
    from tridock.experiment import is_command

    return (run / run_folder.JOB).is_file() and is_command(run / run_folder.EXPERIMENT)


def _reproduce_under_slurm(arguments: Arguments, run: Path) -> tuple[Outcome | None, int]:
    from tridock.ops.runs.reproduce import compare_with
    from tridock.ops.slurm.submit import again, submit
    from tridock.reproduction.original import read_original

    original = read_original(run, losses=False)
    options = again(run, arguments.confirm)
    job = submit(options, say)
    (folder,) = job.folders
    say(f"job {job.job_id}\nrun {folder.name}: repeats {run.name}; folder {folder}")
    if (code := follow_job(options.workspace, job)) or not _has_losses(original):
        return None, code
    return compare_with(run, folder, _print_environment, arguments.tolerance), 0


def _print_environment(differences: Sequence[Difference], notes: Sequence[str]) -> None:
    from tridock.report.run_tables import environment_table

    print_tables(environment_table(differences))
    for note in notes:
        say(f"note: {note}")


def _triage(arguments: Arguments) -> int:
    """Explain why a run failed: the rank that failed first, the cause, and the fix."""
    run = arguments.named_run
    found: RunFailedError | str
    failure = None
    if run is not None and arguments.is_run_folder(run):
        from tridock.contracts.run_state import RunState, state_of
        from tridock.ops.runs.local_run import triage_here

        state = state_of(Path(run))
        well = state in (RunState.RUNNING, RunState.DONE, RunState.STOPPED, RunState.PREEMPTED)
        found = f"{run}: did not fail: {state}" if well else triage_here(Path(run))
    else:
        from tridock.ops.runs.triage import triage

        # The unreachable host may be the cause: the others have evidence.
        client, failure = reachable(arguments)
        found = triage(client, run)
    if arguments.json:
        shown = None if isinstance(found, str) else found.document
        print_json(triage=shown, problems=problem_documents(failure))
        return failure.exit_code if shown is None and failure is not None else 0
    say(str(found))
    return 0


def _replan(arguments: Arguments) -> int:
    """Show how a run continues after it loses nodes: on spare nodes, or with fewer replicas. Changes nothing: the
    supervisor of the run does the same when it restarts the run."""
    from tridock.ops.runs.replan import replan

    if not arguments.without and arguments.head is None:
        raise RequestError(Problem("--without", "is missing", "", "name the node that the run has lost"))
    found = replan(
        arguments.run, arguments.without, arguments.spare, from_scratch=arguments.from_scratch, head=arguments.head
    )
    if arguments.json:
        print_json(**asdict(found.new_layout()))
    else:
        print(found.summary)
    return 0
