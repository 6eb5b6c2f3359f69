"""Repeats a run on a cluster: fetches its folder, starts the new run as any other, and compares both."""

from dataclasses import replace
from pathlib import Path

from tridock.cluster.settings import Cluster
from tridock.contracts.records import check_run, read_plan, slots_of
from tridock.contracts.run_folder import EXPERIMENT, REPRODUCTION
from tridock.errors import Problem, RequestError
from tridock.experiment import is_command, load_command
from tridock.launchers.run import RunBundle
from tridock.launchers.ssh import Ssh
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.cluster_runs import Run, of_nodes
from tridock.ops.runs.code import code_of_run
from tridock.ops.runs.fetch import fetch
from tridock.ops.runs.launch import launch
from tridock.ops.runs.prepare import on_hosts_gpus, prepare_on
from tridock.ops.runs.prepared import prepare_command
from tridock.ops.runs.recorded_run import Confirm, confirm_run
from tridock.ops.runs.reproduce import Gate, Tell, compare
from tridock.reproduction.original import read_original
from tridock.reproduction.outcome import Outcome


def start(
    hosts: Hosts, run: Path, tell: Tell, confirm: Confirm, *, chosen: bool = False, force: bool = False
) -> tuple[RunBundle, NodeClient, Gate]:
    """Starts the run again, once ``confirm`` allows what its folder would execute or set.

    ``chosen``: the user has chosen the cluster's slots. First raises :class:`RequestError` if the data differs or the
    cluster does not fit.
    """
    cluster = on_its_slots(hosts.cluster, run, chosen=chosen, force=force)
    hosts = hosts.within(cluster)
    if is_command(run / EXPERIMENT):
        gate, code = Gate(read_original(run, losses=False), tell, force), code_of_run(run)
        program = prepare_command(load_command(run / EXPERIMENT), code, hosts.cluster.slots, Ssh())
        confirm_run(run, confirm, more=[f"send {code.number} of {code.folder}"])
        return *launch(NodeClient.of(hosts), program, approve=gate.pass_through), gate
    confirm_run(run, confirm)
    gate = Gate(read_original(run), tell, force)
    prepared = prepare_on(hosts.cluster, gate.original.experiment, force=force)
    client = NodeClient.of(hosts)
    return *launch(client, on_hosts_gpus(client.states, prepared), approve=gate.pass_through), gate


def on_its_slots(cluster: Cluster, run: Path, *, chosen: bool = False, force: bool = False) -> Cluster:
    """Returns the cluster with the nodes and slots that the run used. Where it lacks one, or other slots are
    ``chosen``, these must be as many on each node, unless forced. Raises :class:`RequestError`."""
    check_run(run)
    then, there = slots_of(read_plan(run)), {node.name: node.slots for node in cluster.nodes}
    has_them = all(len({*range(there.get(node, 0))} & {*slots}) == len(slots) for node, slots in then.items())
    if then and has_them and not chosen:
        spares = {node: slots for node, slots in cluster.spares.items() if node not in then}
        return replace(cluster, slots=then, spares=spares)
    if force or [*map(len, then.values())] == [*map(len, cluster.slots.values())]:
        return cluster
    what = f"ran on {of_nodes(then) or 'unknown slots'}: it is repeated on these, or on as many slots of each node"
    todo = "choose such with --hosts and --include, or repeat it on these slots with --force"
    raise RequestError(Problem(run.name, what, of_nodes(cluster.slots), todo))


def finish(client: NodeClient, run: Run, gate: Gate, home: Path, tolerance: float | None) -> Outcome:
    """Fetches the new run and compares it; saves the outcome in its folder, here and on the head."""
    folder = fetch(client, run, home)
    outcome = compare(gate.original, folder, gate.differing, tolerance)
    outcome.write(folder)
    there = f"{client.workspace(run.head)}/runs/{run.run_id}"
    client.hosts[run.head].put_tree({REPRODUCTION: outcome.to_json().encode()}, there)
    return outcome
