"""Tridock's tasks: each parses its options, calls an operation and prints. `fab --list` shows them.

Every task takes --hosts: a DeepSpeed hostfile, with its settings in a .yaml file beside it.
"""

from __future__ import annotations

import functools
import json as json_
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fabric import task
from invoke.context import Context
from invoke.exceptions import Exit
from rich.console import Console
from rich.table import Table

from tridock.contracts.run_folder import REPORT, write_atomic
from tridock.differences import Difference
from tridock.errors import (
    EXIT_INTERRUPTED,
    ClusterError,
    Problem,
    RequestError,
    RunError,
    TridockError,
    extras_explained,
)
from tridock.launchers.run import RunBundle
from tridock.ops import doctor
from tridock.ops.hosts import keys as keys_
from tridock.ops.hosts import nodes
from tridock.ops.hosts.session import Session
from tridock.ops.runs import fetch as fetch_
from tridock.ops.runs import launch as launch_
from tridock.ops.runs import logs as logs_
from tridock.ops.runs import registry
from tridock.ops.runs import reproduce_remote as reproduce_
from tridock.ops.runs import triage as triage_
from tridock.ops.runs.prepare import DEFAULT_CONFIG, assumptions_for, with_hosts_gpu
from tridock.ops.runs.reproduce import check_tolerance
from tridock.ops.sync import operation as sync_
from tridock.report.page import write_report
from tridock.report.plan_output import Show, headline, print_plan
from tridock.report.run_tables import environment_table, history_table, status_table, verdict_table

CONSOLE = Console(highlight=False, soft_wrap=True)
_WATCH_S, _WIDE = 2.0, 160

HELP = {
    "hosts": "a DeepSpeed hostfile: lines of `host slots=N`",
    "config": f"the experiment's YAML file (default: {DEFAULT_CONFIG})",
    "set": "change a field of the experiment: --set train.seed=7 (may be repeated)",
    "include": "run on these nodes and slots only, in DeepSpeed's syntax: host-a@host-b:0,2",
    "exclude": "run on all but these nodes and slots, in DeepSpeed's syntax",
    "dry-run": "show what would be done, and change nothing",
    "detach": "start the run and return at once",
    "run-id-file": "write the run id to this file, for scripts",
    "run": "run id (default: the active run if there is only one, else the last)",
    "rank": "show the log of this rank, or of several (0,3), instead of the launcher's output",
    "node": "show the logs of all ranks of this node instead of the launcher's output",
    "follow": "print new log lines until the run has ended",
    "watch": "refresh every 2 s until Ctrl-C",
    "rotate": "replace all keys; runs continue",
    "gpu": "GPU of the nodes (v100-16gb, a100-80gb, h200, ...) or its memory (24gib) (default: ask the hosts)",
    "tflops": "TFLOP/s that a GPU achieves, for the estimated times (default: half of its peak)",
    "tokens": "estimate the time to train this many tokens: 300e9 (default: the run's own)",
    "search": "list the layouts that fit, best first, and why others do not",
    "json": "print everything as JSON",
    "plot": "also draw the rank map: a .png or .svg file",
    "path": "data set prefix, file or folder of the project; may be repeated (default: what the experiment reads)",
    "checkpoints": "fetch the checkpoints too",
    "fix": "fix what is safe to fix: keys, image, stopped nodes, leftovers of dead runs; print each fix",
    "output": "file of the page (default: report.html in the folder of the first run)",
    "tolerance": "allowed loss difference, relative to max(1, abs(loss)) (default: 0 on CPUs, else by precision)",
    "check": "run the doctor's quick checks first; --no-check skips them",
}


def command(
    *, iterable: tuple[str, ...] = (), task_name: str | None = None, **own: str
) -> Callable[[Callable[..., None]], Any]:
    """A Fabric task with our help texts (or its `own`), whose package errors become its exit message and code, once."""

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def run(context: Context, *args: Any, **options: Any) -> None:
            try:
                with extras_explained():
                    function(context, *args, **options)
            except TridockError as error:
                raise Exit(str(error), error.exit_code) from None
            except KeyboardInterrupt:
                raise Exit("interrupted", EXIT_INTERRUPTED) from None

        names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
        texts = {name.replace("_", "-"): own.get(name) or HELP[name.replace("_", "-")] for name in names}
        return task(run, name=task_name, help=texts, iterable=list(iterable), auto_shortflags=False)

    return decorate


@command()
def up(_: Context, hosts: str = "", include: str = "", exclude: str = "") -> None:
    """Start the cluster: keys, image, one node per host."""
    session = _open(hosts, include, exclude)
    image_id = nodes.up(session)
    CONSOLE.print(f"{len(session.nodes)} nodes up, image {image_id[:19]}: {', '.join(session.nodes)}")


@command(force="remove the nodes even if runs are active")
def down(_: Context, hosts: str = "", include: str = "", exclude: str = "", force: bool = False) -> None:
    """Remove the nodes; run folders and data stay on the hosts."""
    removed = nodes.down(_open(hosts, include, exclude), force=force)
    CONSOLE.print(f"removed {', '.join(removed)}" if removed else "no node was up")


@command()
def keys(_: Context, hosts: str = "", rotate: bool = False) -> None:
    """Create and distribute the cluster's SSH keys."""
    session = _open(hosts)
    store = keys_.distribute_keys(session, rotate=rotate)
    CONSOLE.print(f"keys of {len(session.nodes)} nodes in place; client key {store.fingerprint()}")


@command(iterable=("set",), config="experiment's YAML file: check its data and its port too")
def check(
    _: Context,
    hosts: str = "",
    config: str = "",
    set: list[str] | None = None,
    include: str = "",
    exclude: str = "",
    fix: bool = False,
    json: bool = False,
) -> None:
    """Check every host, node and device; print each problem with its fix."""
    session = _open(hosts, include, exclude)
    if set and not config:
        raise RequestError(Problem("--set", "changes an experiment, and none is named", "", "name one with --config"))
    request = doctor.Request(Path(config), set or []) if config else None
    report = doctor.check(session, request)
    if fix and doctor.mend(session, report, lambda line: print(line, file=sys.stderr, flush=True)):
        report = doctor.check(session, request)
    if json:
        _say(json_.dumps(doctor.to_json(report), indent=2))
    else:
        CONSOLE.print(doctor.table(report))
        _say("\n".join(doctor.lines(report)))
    if not report.healthy:
        raise Exit(None, ClusterError.exit_code)


@command(iterable=("set",))
def plan(
    _: Context,
    hosts: str = "",
    config: str = "",
    set: list[str] | None = None,
    include: str = "",
    exclude: str = "",
    gpu: str = "",
    tflops: str = "",
    tokens: str = "",
    search: bool = False,
    json: bool = False,
    plot: str = "",
) -> None:
    """Plan an experiment: rank placement, memory and cost, or why it cannot run."""
    session = _open(hosts, include, exclude)
    path = Path(config or DEFAULT_CONFIG)
    known = assumptions_for(session.cluster, gpu or None, None, _number("tflops", tflops), _number("tokens", tokens))
    if known.gpu is None:
        session, failure = session.reachable()
        known = with_hosts_gpu(known, session)
        if failure is not None:  # a plan needs no host: what is missing is said, and the rest shown
            print(failure, file=sys.stderr)
    if code := print_plan(path, set or [], session.cluster.slots, known, CONSOLE, Show(search, json, plot)):
        raise Exit(None, code)


def _number(option: str, text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise RequestError(Problem(f"--{option}", "is not a number", repr(text), "write it as in 300e9")) from None


@command(
    iterable=("set",),
    dry_run="print the command and the run's files; contact no host",
    force="launch even if the plan says that it does not fit",
)
def launch(
    _: Context,
    hosts: str = "",
    config: str = "",
    set: list[str] | None = None,
    include: str = "",
    exclude: str = "",
    dry_run: bool = False,
    detach: bool = False,
    force: bool = False,
    run_id_file: str = "",
    check: bool = True,
) -> None:
    """Run an experiment on the cluster and follow its output; Ctrl-C detaches, the run continues."""
    session = _open(hosts, include, exclude)
    prepared = launch_.prepare_on(session, Path(config or DEFAULT_CONFIG), set or [], force=force)
    if dry_run:
        _show(launch_.preview(session, prepared))
        return
    prepared = launch_.on_hosts_gpus(session, prepared)
    CONSOLE.print(headline(prepared.assessment))
    if not config:
        _say(launch_.bring_demo_data(session))
    bundle = launch_.launch(session, prepared, check=check)
    if run_id_file:
        write_atomic(Path(run_id_file), f"{bundle.run_id}\n".encode())
    plan, nodes = prepared.plan, len(session.cluster.slots)
    _say(f"run {bundle.run_id}: {plan.world_size} ranks on {nodes} nodes, {plan.layout}")
    if detach:
        _say(_how_to_return(hosts, bundle.run_id))
        return
    _follow(session, hosts, registry.Run(bundle.run_id, session.head))


@command()
def logs(
    _: Context,
    hosts: str = "",
    run: str = "",
    rank: str = "",
    node: str = "",
    follow: bool = False,
    include: str = "",
    exclude: str = "",
) -> None:
    """Follow a run's output, or show the logs of ranks or of a node."""
    session = _reachable(_open(hosts, include, exclude))[0]
    chosen = registry.choose_run(session, run or None, active=False)
    if not rank and not node:
        _follow(session, hosts, chosen)
        return
    for part in logs_.read_rank_logs(session, chosen, logs_.choose_ranks(session, chosen, rank, node), follow=follow):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()


@command()
def stop(_: Context, hosts: str = "", run: str = "", include: str = "", exclude: str = "") -> None:
    """Stop one run on every node; other runs continue."""
    session, failure = _reachable(_open(hosts, include, exclude))
    chosen = registry.choose_run(session, run or None, active=True)
    counts = registry.stop(session, chosen)
    CONSOLE.print(
        f"stopped {chosen.run_id}: " + ", ".join(f"{count} processes on {node}" for node, count in counts.items())
    )
    if failure is not None:
        _say("a node that has lost the head ends its processes of the run by itself")
        raise Exit(None, failure.exit_code)


@command()
def status(_: Context, hosts: str = "", include: str = "", exclude: str = "", watch: bool = False) -> None:
    """Show the nodes and the last runs; hosts that do not answer are listed as unreachable."""
    session = _open(hosts, include, exclude)
    if not watch:
        tables, failure = _status(session)
        _show_tables(*tables)
        if failure is not None:
            raise failure
        return
    with suppress(KeyboardInterrupt):  # the way out, and no failure: as of watch(1)
        while True:
            tables, failure = _status(session)
            CONSOLE.clear()
            _show_tables(*tables)
            if failure is not None:
                _say(str(failure))
            time.sleep(_WATCH_S)


def _status(session: Session) -> tuple[list[Table], TridockError | None]:
    there, failure = session.reachable()
    tables = [_node_table(there)]
    try:
        if any(state.container and state.container.running for state in there.states().values()):
            tables.append(status_table(registry.list_runs(there)[-10:]))
    except ClusterError as error:  # a node that went away since
        return tables, failure or error
    return tables, failure


@command(task_name="runs")
def all_runs(_: Context, hosts: str = "", include: str = "", exclude: str = "", json: bool = False) -> None:
    """List all runs, newest first."""
    session, failure = _open(hosts, include, exclude).reachable()
    listed = registry.list_runs(session)[::-1] if session.nodes else []
    if json:
        _say(json_.dumps([asdict(run) for run in listed], indent=2))
    else:
        _show_tables(history_table(listed))
    if failure is not None:
        raise failure


@command()
def triage(_: Context, hosts: str = "", run: str = "", include: str = "", exclude: str = "") -> None:
    """Explain why a run failed: the first rank, the cause, the fix."""
    # The host that is away may be the cause: the others have something to tell.
    session = _reachable(_open(hosts, include, exclude))[0]
    _say(str(triage_.triage(session, run or None)))


@command()
def fetch(
    _: Context, hosts: str = "", run: str = "", checkpoints: bool = False, include: str = "", exclude: str = ""
) -> None:
    """Copy a run's folder from the cluster into runs/."""
    session = _open(hosts, include, exclude)
    chosen = registry.choose_run(session, run or None, active=False)
    CONSOLE.print(str(fetch_.fetch(session, chosen, Path("runs"), checkpoints=checkpoints)))


@command(iterable=("run",), run="run id; may be repeated to overlay several runs (default: as fab logs)")
def report(
    _: Context, hosts: str = "", run: list[str] | None = None, output: str = "", include: str = "", exclude: str = ""
) -> None:
    """Write an HTML page of one or more runs: curves, memory, layout, events, plan and measurement."""
    session = _open(hosts, include, exclude)
    names: list[str | None] = [*run] if run else [None]
    chosen = [registry.choose_run(session, name, active=False) for name in names]
    folders = [fetch_.fetch(session, it, Path("runs")) for it in chosen]
    page, *charts = write_report(folders, [], Path(output) if output else folders[0] / REPORT)
    _say(f"page {page}, {len(charts)} charts beside it")


@command(
    force="reproduce even if the data differs or the plan says that it does not fit",
    run="run id, of this cluster or in runs/ (default: as fab logs)",
)
def reproduce(
    _: Context,
    hosts: str = "",
    run: str = "",
    tolerance: str = "",
    include: str = "",
    exclude: str = "",
    force: bool = False,
) -> None:
    """Run a run again from its folder and compare the losses."""
    session = _open(hosts, include, exclude)
    allowed = _number("tolerance", tolerance)
    check_tolerance(allowed)
    original = reproduce_.original_of(session, run or None, Path("runs"))
    bundle, gate = reproduce_.start(session, original, _tell_differences, force=force)
    again = registry.Run(bundle.run_id, session.head)
    _say(f"run {bundle.run_id}: {original.name} once more")
    _follow(session, hosts, again)
    outcome = reproduce_.finish(session, again, gate, Path("runs"), allowed)
    _show_tables(verdict_table(outcome))
    if outcome.verdict == "different":
        raise Exit(None, RunError.exit_code)


def _tell_differences(found: Sequence[Difference], notes: Sequence[str]) -> None:
    _show_tables(environment_table(found))
    for note in notes:
        _say(f"note: {note}")


@command(iterable=("path", "set"))
def data(
    _: Context,
    hosts: str = "",
    path: list[str] | None = None,
    config: str = "",
    set: list[str] | None = None,
    include: str = "",
    exclude: str = "",
    dry_run: bool = False,
) -> None:
    """Copy data to the hosts that miss it, compared by hash; Megatron's index maps too."""
    sync_.run(_open(hosts, include, exclude), path or [], config, set or [], CONSOLE.print, dry_run=dry_run)


def _open(hosts: str, include: str = "", exclude: str = "") -> Session:
    if not hosts:
        raise RequestError(Problem("--hosts", "is missing", "", "give a DeepSpeed hostfile, for example hostfiles/lab"))
    return Session.open(Path(hosts), include, exclude)


def _reachable(session: Session) -> tuple[Session, TridockError | None]:
    """The session with the hosts that answer, once the others are named; an error where none does."""
    there, failure = session.reachable()
    if failure is not None:
        if not there.nodes:
            raise failure
        print(failure, file=sys.stderr)
    return there, failure


def _follow(session: Session, hosts: str, run: registry.Run) -> None:
    run_id, stream = run.run_id, logs_.follow(session, run)
    try:
        for chunk in stream:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        _say(f"\ndetached: run {run_id} continues. {_how_to_return(hosts, run_id)}")
        raise Exit(None, EXIT_INTERRUPTED) from None
    triage_.check_exit(session, run, stream.exit_code)
    _say(f"run {run_id} is done; its folder is {registry.folder_of(session, run)}")


def _how_to_return(hosts: str, run_id: str) -> str:
    return (
        f"Come back with: fab logs --hosts {hosts} --run {run_id}\n"
        f"Stop it with:   fab stop --hosts {hosts} --run {run_id}"
    )


def _show(bundle: RunBundle) -> None:
    _say(f"# on the head, in {bundle.path}:\n{bundle.command}")
    for name, content in bundle.files.items():
        _say(f"\n# {name}\n{content.decode()}".rstrip())


def _show_tables(*tables: Table) -> None:
    # Rich takes what is no terminal to be 80 columns wide, and would cut what scripts read.
    console = CONSOLE if CONSOLE.is_terminal else Console(highlight=False, soft_wrap=True, width=_WIDE)
    console.print(*tables, sep="\n")


def _say(text: str) -> None:
    # Not through Rich: a path or a command line must come out as it is, to be copied.
    print(text, flush=True)


def _node_table(session: Session) -> Table:
    table = Table("node", "slots", "container", "image", title=f"cluster {session.cluster.name}", title_justify="left")
    states = session.states()
    for node, numbers in session.cluster.everywhere.items():
        state, slots = states.get(node), str(len(numbers)) + (" spare" if node in session.cluster.spares else "")
        if state is None:
            table.add_row(node, slots, "unreachable", "")
            continue
        container = state.container
        shown = "none" if container is None else "running" if container.running else f"exited {container.exit_code}"
        image = (container.image_id if container else state.image_id) or "none"
        table.add_row(node, slots, shown, image.removeprefix("sha256:")[:12])
    return table
