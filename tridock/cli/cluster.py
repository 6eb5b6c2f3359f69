"""``tridock up``, ``down``, ``keys``, ``check`` and ``status``: the nodes of a cluster."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tridock.cli.options import (
    Commands,
    add_cluster,
    add_command,
    add_config,
    add_quiet,
    add_set,
    config_of,
    open_session,
)
from tridock.cli.output import print_tables, redraw_tables, say
from tridock.errors import ClusterError, Problem, RequestError, TridockError, count

if TYPE_CHECKING:
    from rich.table import Table

    from tridock.ops.hosts.session import Session

_WATCH_S: Final = 2.0


def add(commands: Commands) -> None:
    parser = add_command(commands, "up", _up, "start one node per host", "--hosts hostfile", "--hosts hostfiles/twin")
    add_cluster(parser)
    text = "afterwards, remove the cluster's older images from its hosts"
    parser.add_argument("--prune", action="store_true", help=text)
    add_quiet(parser)

    examples: tuple[str, ...] = ("--hosts hostfile", "--hosts hostfile --include host-b")
    parser = add_command(commands, "down", _down, "remove the nodes; keep data and runs", *examples)
    add_cluster(parser)
    parser.add_argument("--force", action="store_true", help="remove the nodes even if runs are active")
    add_quiet(parser)

    examples = ("--hosts hostfile", "--hosts hostfile --rotate")
    parser = add_command(commands, "keys", _keys, "create and distribute the cluster's SSH keys", *examples)
    add_cluster(parser)
    parser.add_argument("--rotate", action="store_true", help="replace all keys; runs continue")
    add_quiet(parser)

    examples = ("--hosts hostfile", "--hosts hostfile --fix", "--hosts hostfile --config configs/demo-3d.yaml --json")
    parser = add_command(commands, "check", _check, "check hosts, nodes and devices", *examples)
    add_cluster(parser)
    add_config(parser, "none; if given, also check its data and port")
    add_set(parser)
    text = "apply the safe fixes (keys, image, stopped nodes, leftovers of dead runs), and print each of them"
    parser.add_argument("--fix", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")

    examples = ("--hosts hostfile", "--hosts hostfile --watch")
    parser = add_command(commands, "status", _status, "show the nodes and the last runs", *examples)
    add_cluster(parser)
    parser.add_argument("--watch", action="store_true", help="refresh every 2 s until Ctrl-C")


def _up(arguments: argparse.Namespace) -> int:
    """Start the cluster: create the keys, distribute the image, and start one node per host. Skip what is already
    right.
    """
    session = open_session(arguments, ahead=True)
    from tridock.ops.hosts import nodes

    nodes.ask_whether_ready(session)
    image_id = nodes.up(session)
    if not arguments.quiet:
        say(f"{count(len(session.nodes), 'node')} up, image {image_id[:19]}: {', '.join(session.nodes)}")
    if arguments.prune:
        from tridock.ops.image.prune import prune

        for node, images in prune(session).items():
            say(f"{node}: removed {count(len(images.removed), 'older image')}, kept {len(images.kept)} in use")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    """Remove the nodes. Run folders and data stay on the hosts."""
    session = open_session(arguments, ahead=True)
    from tridock.ops.hosts import nodes

    removed = nodes.down(session, force=arguments.force)
    if not arguments.quiet:
        say(f"removed {', '.join(removed)}" if removed else "no node was up")
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    """Create and distribute the SSH keys that the nodes use to reach each other."""
    session = open_session(arguments, ahead=True)
    from tridock.ops.hosts.keys import distribute_keys

    store = distribute_keys(session, rotate=arguments.rotate)
    if not arguments.quiet:
        say(f"keys of {count(len(session.nodes), 'node')} in place; client key {store.fingerprint()}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Check every host, node and device, run an all-reduce, and print each problem with its fix. The exit code is 3 if
    there is a problem.
    """
    config = config_of(arguments)
    if arguments.set and config is None:
        raise RequestError(Problem("--set", "needs an experiment, but none is named", "", "name one with --config"))
    session = open_session(arguments, ahead=True)
    from tridock.ops import doctor

    report = doctor.check(session, doctor.Request(config, arguments.set) if config else None)
    if arguments.fix and doctor.apply_fixes(session, report, lambda line: print(line, file=sys.stderr, flush=True)):
        report = doctor.check(session, doctor.Request(config, arguments.set) if config else None)
    if arguments.json:
        say(json.dumps(doctor.to_json(report), indent=2))
    else:
        print_tables(doctor.table(report))
        say("\n".join(doctor.lines(report)))
    return 0 if report.healthy else ClusterError.exit_code


def _status(arguments: argparse.Namespace) -> int:
    """Show the nodes, the last runs and their progress. Hosts that do not answer are listed as unreachable."""
    session = open_session(arguments, ahead=True)
    if not arguments.watch:
        tables, failure = _tables(session)
        print_tables(*tables)
        if failure is not None:
            raise failure
        return 0
    with suppress(KeyboardInterrupt):  # the normal end of a watch
        while True:
            tables, failure = _tables(session)
            redraw_tables(*tables, note="" if failure is None else f"{failure}\n")
            time.sleep(_WATCH_S)
    return 0


def _tables(session: Session) -> tuple[list[Table], TridockError | None]:
    import rich.console  # noqa: F401 - before the hosts are asked

    from tridock.ops.runs.registry import ask_for_runs, list_runs, queued_runs
    from tridock.report.run_tables import queue_table, status_table

    ask_for_runs(session)
    session.reads_keys = False
    there, failure = session.reachable()
    tables = [_node_table(there)]
    try:
        if any(state.container and state.container.running for state in there.states().values()):
            tables.append(status_table(list_runs(there)[-10:]))
            if queued := queued_runs(there):
                tables.append(queue_table(queued))
    except ClusterError as error:  # a node that has disappeared since
        return tables, failure or error
    return tables, failure


def _node_table(session: Session) -> Table:
    from rich.table import Table

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
