"""Runs of other clusters on the same hosts, whatever their account, and the slots of this cluster that they use."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Final

from tridock.command import Command
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import RunInfo
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.client import NODE, NodeClient
from tridock.ops.hosts.facts import Container
from tridock.ops.runs.cluster_runs import by, of_nodes, until
from tridock.remote import Host

_TIMEOUT_S: Final = 60.0
# A line for each node of another cluster: its runs, or why it does not say; none if it has gone since.
_RUNS: Final = """
for it; do
  answer=$(docker exec --user "${it%/*}" "${it#*/}" $0 runs 2>&1) ||
    [ "$(docker inspect --format '{{.State.Running}}' "${it#*/}" 2>/dev/null)" = true ] || answer='[]'
  printf '%s\\n' "$answer" | tail -n 1
done
"""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An active run of another cluster, and the devices that it uses on the hosts of this one's nodes."""

    cluster: str
    run: RunInfo
    devices: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        """What it uses: ``host-a: GPU 0, GPU 1; host-b: GPU 0``."""
        return "; ".join(f"{node}: {', '.join(devices)}" for node, devices in self.devices.items())


def neighbours(client: NodeClient) -> list[Neighbour]:
    """Returns the active runs of the other clusters whose containers Docker shows on the hosts.

    Raises :class:`ClusterError` where a node of theirs does not say.
    """
    others = {node: state.others for node, state in client.states.items() if state.others}

    def ask(node: str, host: Host) -> list[str]:
        named = (f"{it.user}/{it.id}" for it in others[node])
        done = host.run(Command.of("sh", "-c", _RUNS, " ".join(NODE), *named), timeout=_TIMEOUT_S)
        return done.checked(node).stdout.decode(errors="replace").splitlines()

    found: dict[str, Neighbour] = {}
    shared = others if client.hosts.transport.separate_hosts else ()
    for node, answers in client.hosts.each(ask, only=shared).items():
        for other, answer in zip(others[node], answers, strict=True):
            for run in _runs(node, other, answer):
                if slots := run.slots.get(other.node):
                    devices = tuple(other.device(slot, client.states[node].uuids) for slot in slots)
                    known = found.get(run.run_id, Neighbour(other.cluster, run, {}))
                    run = known.run if run.metrics is None else run  # its head knows more
                    found[run.run_id] = Neighbour(other.cluster, run, {**known.devices, node: devices})
    return sorted(found.values(), key=lambda it: (it.cluster, it.run.run_id))


def _runs(node: str, other: Container, answer: str) -> tuple[RunInfo, ...]:
    known = {it.name for it in fields(RunInfo)}  # its image may be of a later Tridock
    try:
        runs = [{name: run[name] for name in run.keys() & known} for run in json.loads(answer)]
        return decode(tuple[RunInfo, ...], json.dumps(runs))
    except (ValueError, AttributeError, TypeError):
        what = f"its node of cluster {other.cluster} does not say which slots its runs use"
        raise ClusterError(Problem(node, what, answer[-300:], "look at it there, or give --share")) from None


def devices_of(client: NodeClient) -> dict[str, tuple[str, ...]]:
    """Returns what the slots of each node are on its host, those of spares too; none where nodes share one."""
    slots = {**client.cluster.spares, **client.cluster.slots} if client.hosts.transport.separate_hosts else {}
    return {
        node: tuple(container.device(slot, client.states[node].uuids) for slot in numbers)
        for node, numbers in slots.items()
        if (container := client.states[node].container) is not None
    }


def on_our_slots(client: NodeClient) -> list[Problem]:
    """Returns the runs of other clusters that use slots of this one."""
    problems, ours = [], devices_of(client)
    for it in neighbours(client):
        slots = {
            node: [slot for slot, name in zip(numbers, ours[node], strict=True) if name in it.devices[node]]
            for node, numbers in client.cluster.slots.items()
            if node in it.devices and node in ours
        }
        if got := of_nodes(slots):
            what = f"is running on slots that this run would use, in cluster {it.cluster}"
            todo = "wait for it (--queue), have it stopped there, leave its slots out (--exclude), or give --share"
            problems.append(Problem(it.run.run_id, what, got + by(it.run) + until(it.run, datetime.now(UTC)), todo))
    return problems


def refuse_slots_of_neighbours(client: NodeClient) -> None:
    """Raises :class:`RequestError` with the runs of other clusters that use slots of this one."""
    RequestError.raise_for(on_our_slots(client))
