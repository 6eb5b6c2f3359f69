"""``tridock up``, ``down``, ``keys``, ``check`` and ``status``: the nodes of a cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from tridock.cli.options import Arguments, Commands, add_command
from tridock.cli.output import print_json, print_tables, problem_documents, redraw_tables, report_failure, say
from tridock.errors import ClusterError, Problem, RequestError, TridockError, count

if TYPE_CHECKING:
    from rich.table import Table

    from tridock.cluster.settings import Cluster
    from tridock.contracts.node_answers import QueuedRun, RunInfo
    from tridock.ops.hosts.facts import HostState
    from tridock.ops.hosts.hosts import Hosts
    from tridock.ops.runs.neighbours import Neighbour

_WATCH_S: Final = 2.0


def add(commands: Commands) -> None:
    parser = add_command(commands, "up", _up, "start one node per host", "--hosts hostfile", "--hosts hostfiles/twin")
    parser.add_cluster()
    parser.add_flag("--prune", "afterwards, remove the cluster's older images from its hosts")
    parser.add_quiet()

    examples: tuple[str, ...] = ("--hosts hostfile", "--hosts hostfile --include host-b")
    parser = add_command(commands, "down", _down, "remove the nodes; keep data and runs", *examples)
    parser.add_cluster()
    parser.add_flag("--force", "remove the nodes even if runs are active")
    parser.add_quiet()

    examples = ("--hosts hostfile", "--hosts hostfile --rotate")
    parser = add_command(commands, "keys", _keys, "create and distribute the cluster's SSH keys", *examples)
    parser.add_cluster()
    parser.add_flag("--rotate", "replace all keys; runs continue")
    parser.add_quiet()

    examples = ("--hosts hostfile", "--hosts hostfile --fix", "--hosts hostfile --config configs/demo-3d.yaml --json")
    parser = add_command(commands, "check", _check, "check hosts, nodes and devices", *examples)
    parser.add_cluster()
    parser.add_config("none; if given, also check its data and port")
    parser.add_set()
    text = "apply the safe fixes (keys, image, stopped nodes, leftovers of dead runs), and print each of them"
    parser.add_flag("--fix", text)
    parser.add_flag("--json", "print the report as JSON")

    examples = ("--hosts hostfile", "--hosts hostfile --watch")
    parser = add_command(commands, "status", _status, "show the nodes and the last runs", *examples)
    parser.add_cluster()
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="refresh every 2 s until Ctrl-C")
    form.add_argument("--json", action="store_true", help="print nodes, runs and queue as JSON")


def _up(arguments: Arguments) -> int:
    """Start the cluster: create the keys, distribute the image, and start one node per host. Skip what is already
    right."""
    hosts = arguments.open_hosts()
    from tridock.ops.nodes import containers

    image_id = containers.up(hosts)
    arguments.note(f"{count(len(hosts), 'node')} up, image {image_id[:19]}: {', '.join(hosts)}")
    if arguments.prune:
        from tridock.ops.image.ensure import prune

        for node, images in prune(hosts).items():
            say(f"{node}: removed {count(len(images.removed), 'older image')}, kept {len(images.kept)} in use")
    return 0


def _down(arguments: Arguments) -> int:
    """Remove the nodes. Run folders and data stay on the hosts."""
    hosts = arguments.open_hosts()
    from tridock.ops.nodes import containers

    removed = containers.down(hosts, force=arguments.force)
    arguments.note(f"removed {', '.join(removed)}" if removed else "no node was up")
    return 0


def _keys(arguments: Arguments) -> int:
    """Create and distribute the SSH keys that the nodes use to reach each other."""
    hosts = arguments.open_hosts()
    from tridock.ops.hosts.keys import keys

    store = keys(hosts, rotate=arguments.rotate)
    arguments.note(f"keys of {count(len(hosts), 'node')} in place; client key {store.fingerprint()}")
    return 0


def _check(arguments: Arguments) -> int:
    """Check every host, node and device, run an all-reduce, and print each problem with its fix. The exit code is 3 if
    there is a problem."""
    config = arguments.named_config
    if arguments.set and config is None:
        raise RequestError(Problem("--set", "needs an experiment, but none is named", "", "name one with --config"))
    hosts = arguments.open_hosts()
    from tridock.ops.doctor.check import check
    from tridock.ops.doctor.report import apply_fixes, lines, table, to_json

    report = check(hosts, config, arguments.set)
    if arguments.fix and apply_fixes(hosts, report, lambda line: print(line, file=sys.stderr, flush=True)):
        report = check(hosts, config, arguments.set)
    if arguments.json:
        print_json(**to_json(report))
    else:
        print_tables(table(report))
        say("\n".join(lines(report)))
    return 0 if report.healthy else ClusterError.exit_code


def _status(arguments: Arguments) -> int:
    """Show the nodes, the last runs and their progress. Hosts that do not answer are listed as unreachable."""
    import rich.console  # noqa: F401 - before the hosts are asked

    hosts = arguments.open_hosts()
    if not arguments.watch:
        status = _read_status(hosts)
        if arguments.json:
            runs, queue = ([asdict(run) for run in runs] for runs in (status.runs, status.queue))
            others, problems = [asdict(it) for it in status.others], problem_documents(status.failure)
            about = {"nodes": status.nodes, "runs": runs, "queue": queue, "others": others, "problems": problems}
            print_json(cluster=hosts.cluster.name, **about)
        else:
            print_tables(*_tables(hosts, status))
        return report_failure(status.failure)
    with suppress(KeyboardInterrupt):  # the normal end of a watch
        while True:
            status = _read_status(hosts)
            redraw_tables(*_tables(hosts, status), note="" if status.failure is None else f"{status.failure}\n")
            time.sleep(_WATCH_S)
    return 0


@dataclass(frozen=True, slots=True)
class _Status:
    nodes: Sequence[Mapping[str, object]]
    runs: Sequence[RunInfo]
    queue: Sequence[QueuedRun]
    others: Sequence[Neighbour]
    failure: TridockError | None


def _read_status(hosts: Hosts) -> _Status:
    from tridock.ops.hosts.client import reachable
    from tridock.ops.runs.cluster_runs import list_runs, queued_runs
    from tridock.ops.runs.neighbours import neighbours

    client, failure = reachable(hosts)
    nodes = [_node(hosts.cluster, node, client.states.get(node)) for node in hosts.cluster.everywhere]
    runs: Sequence[RunInfo] = ()
    queue: Sequence[QueuedRun] = ()
    others: Sequence[Neighbour] = ()
    try:
        if any(state.container and state.container.running for state in client.states.values()):
            runs = list_runs(client)[-10:]
            queue = queued_runs(client)
        others = neighbours(client)
    except ClusterError as error:  # a node that has disappeared since
        failure = failure or error
    return _Status(nodes, runs, queue, others, failure)


def _node(cluster: Cluster, node: str, state: HostState | None) -> Mapping[str, object]:
    container = state.container if state else None
    shown = "none" if container is None else "running" if container.running else f"exited {container.exit_code}"
    return {
        "node": node,
        "slots": list(cluster.everywhere[node]),
        "spare": node in cluster.spares,
        "container": shown if state else "unreachable",
        "image": (container.image_id if container else state.image_id) or None if state else None,
    }


def _tables(hosts: Hosts, status: _Status) -> Iterator[Table]:
    from rich.table import Table

    from tridock.report.run_tables import neighbours_table, queue_table, status_table

    nodes = Table("node", "slots", "container", "image", title=f"cluster {hosts.cluster.name}", title_justify="left")
    for it in status.nodes:
        slots = f"{len(hosts.cluster.everywhere[str(it['node'])])}{' spare' if it['spare'] else ''}"
        image = str(it["image"] or "none").removeprefix("sha256:")[:12]
        nodes.add_row(str(it["node"]), slots, str(it["container"]), "" if it["container"] == "unreachable" else image)
    yield nodes
    if any(it["container"] == "running" for it in status.nodes):
        yield status_table(status.runs)
    if status.queue:
        yield queue_table(status.queue)
    if status.others:
        yield neighbours_table([(it.cluster, it.run.run_id, it.run.started_by, str(it)) for it in status.others])
