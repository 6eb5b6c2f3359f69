"""Nodes up and down: one container a host, made from the cluster's recipe, ready when its sshd answers."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from tridock.cluster.transports import ComposeTransport, SshTransport
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.run_folder import write_atomic
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.attached import NodesLock, nodes_locked
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import HostState, States, keys_digest
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.hosts.keys import KeyStore, distribute_keys
from tridock.ops.image.ensure import ensure_image, lacking, verify, wanted_image
from tridock.ops.image.wrap import ensure_wrapped
from tridock.remote import Completed, Host, LocalHost, clock
from tridock.remote.host import shortened

READY_TIMEOUT_S = 60.0
_DOCKER_TIMEOUT_S = 120.0

# The health check of a container that is no node passes too: sshd must have written its pid first.
_PROBE = f"test -e {run_folder.SSHD_PID} && healthcheck.sh"
_READY = f"for n in 1 2 3 4 5 6 7 8 9 10; do ! {{ {_PROBE}; }} || exit 0; sleep 0.2; done; exit 1"
_PROBE_TIMEOUT_S = 30.0

# Made here, as the operator: Docker would make a missing folder as root.
_FOLDERS = ("data", "runs")
_DOWN = '[ -z "$1" ] || docker rm --force "$1" || exit; rm -rf -- "$2"'

# The runs with processes in a node, and who has started each: their ranks and launchers, and the supervisor and agents
# of those that go on.
_RUNS = r"""
{
grep -hzs '^TRIDOCK_RUN_ID=.' /proc/[0-9]*/environ | tr '\0' '\n' | cut -d = -f 2-
cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | sed -n '/^tridock\.node$/{n;/^\(start\|agent\)$/{n;p;}}' |
  while read -r folder; do [ -e "$folder/exit_code" ] || echo "${folder##*/}"; done
} | grep -x '[a-z0-9][a-z0-9._-]*-[0-9]\{8\}-[0-9]\{6\}-[0-9a-f]\{4\}' | sort -u |
  while read -r run; do
    echo "$run$(sed -n 's/.*"started_by": "\([^"]*\)".*/ (started by \1)/p' "/workspace/runs/$run/manifest.json")"
  done 2>/dev/null
"""
# Runs the command after "--" unless a run is in one of the containers before it.
_UNLESS_RUNS = r"""
user=$1 question=$2; shift 2
while [ "$1" != -- ]; do
  if [ "$(docker inspect --format '{{.State.Running}}' "$1")" = true ]; then
    runs=$(docker exec --user "$user" "$1" sh -c "$question") || exit 1
    if [ -n "$runs" ]; then echo "$runs" | sed 's/^/tridock-run=/'; exit 76; fi
  fi
  shift
done
shift
exec "$@"
"""
_IN_USE = 76
_RUN = "tridock-run="


def up(hosts: Hosts) -> str:
    """Provides missing or outdated keys, images and nodes; leaves current ones alone. Returns the image's id."""
    ensure_wrapped(hosts.cluster)
    with nodes_locked(hosts) as lock:
        client = NodeClient.of(hosts)
        image_id = wanted_image(hosts.cluster, client.states)
        sends = bool(lacking(client.states, image_id))
        if not sends:
            _up(client, lock, image_id)
    if sends:  # which takes its time: not under the lock
        ensure_image(hosts, image_id)
        with nodes_locked(hosts) as lock:
            client = NodeClient.of(hosts)
            verify(client.states, image_id)
            _up(client, lock, image_id)
    return image_id


def _up(client: NodeClient, lock: NodesLock, image_id: str) -> None:
    hosts, store = client.hosts, KeyStore(client.cluster)
    store.ensure()
    _say_where_no_gpu_is(client)
    if hosts.transport.separate_hosts and not _not_current(client, image_id, store):
        return
    lock.claim()
    client = NodeClient.of(hosts)
    stale = outdated(hosts, client.states, image_id)
    _refuse_while_runs(client, stale, "would be replaced by tridock up")
    # To all before any node starts: a host that cannot hold them leaves none behind.
    store = distribute_keys(client, lock)
    match hosts.transport:
        case ComposeTransport():
            recipes = _recipes(hosts, client.states, image_id)
            _compose(client, lock, stale, recipes, "up", "--detach", "--no-build", "--quiet-pull", *hosts)
        case SshTransport() as ssh:
            missing = [node for node, state in client.states.items() if node in stale or state.container is None]
            hosts.each(lambda node, host: _start(client, lock, ssh, node, host, image_id), only=missing)
    hosts.each(lambda node, host: _wait_ready(client, node, host))


def _say_where_no_gpu_is(client: NodeClient) -> None:
    """Says why a node starts without GPUs, or refuses to start it so, if nvidia-smi is there and finds none."""
    wanted, without = client.cluster.settings.container.gpus, []
    for node, state in client.states.items():
        if state.gpu_error is not None and wanted != "none":
            todo = "mend the driver there (dmesg, nvidia-smi), or set container.gpus: none"
            without.append(Problem(node, "has no GPU", f"nvidia-smi says: {state.gpu_error}", todo))
    if without and wanted == "all":
        raise ClusterError(without)
    for problem in without:
        print(f"warning: {problem}", file=sys.stderr)


def ensure_up(client: NodeClient) -> tuple[str, NodeClient]:
    """Like :func:`up`. If every node is current, it only looks at the states. Returns a client of the nodes, too."""
    hosts, states = client.hosts, client.states
    ensure_wrapped(hosts.cluster)
    image_id = wanted_image(hosts.cluster, states)
    store = KeyStore(hosts.cluster)
    store.ensure()
    if lacking(states, image_id) or _not_current(client, image_id, store):
        return up(hosts), NodeClient.of(hosts)
    return image_id, client


@contextmanager
def kept_up(hosts: Hosts, image_id: str) -> Iterator[tuple[NodesLock, NodeClient]]:
    """Locks the nodes that :func:`ensure_up` has found or made, so that nobody changes them.

    Raises :class:`ClusterError` if somebody has meanwhile.
    """
    with nodes_locked(hosts) as lock:
        lock.claim()
        client = NodeClient.of(hosts)
        stale = outdated(hosts, client.states, image_id)
        todo = "look at tridock status, then run this command again"
        ClusterError.raise_for(
            Problem(node, "its node was changed by another command meanwhile", "", todo)
            for node, state in client.states.items()
            if state.container is None or node in stale
        )
        yield lock, client


def _not_current(client: NodeClient, image_id: str, store: KeyStore) -> tuple[str, ...]:
    """Returns the nodes that are missing, outdated, not healthy, or have other keys than they should."""
    stale = outdated(client.hosts, client.states, image_id)

    def is_current(node: str, state: HostState) -> bool:
        healthy = state.container is not None and state.container.health == "healthy"
        return healthy and node not in stale and state.keys == keys_digest(store.node_files(node))

    return tuple(node for node, state in client.states.items() if not is_current(node, state))


def outdated(hosts: Hosts, states: States, image_id: str) -> tuple[str, ...]:
    """The nodes whose container :func:`up` would replace or start again."""
    recipes = _recipes(hosts, states, image_id)
    return tuple(
        node
        for node, state in states.items()
        if (container := state.container) is not None and not (container.running and container.recipe == recipes[node])
    )


def down(hosts: Hosts, *, force: bool = False) -> tuple[str, ...]:
    """Removes the nodes (and their keys on the hosts); runs' folders and data stay. Returns the nodes removed."""
    with nodes_locked(hosts) as lock:
        lock.claim()
        return _down(NodeClient.of(hosts), lock, force)


def _down(client: NodeClient, lock: NodesLock, force: bool) -> tuple[str, ...]:
    transport, states = client.hosts.transport, client.states
    containers = {node: state.container.id for node, state in states.items() if state.container is not None}
    there = tuple(containers)
    if not force:
        _refuse_while_runs(client, there, "would be removed by tridock down")
    if isinstance(transport, ComposeTransport):
        _compose(client, lock, () if force else there, {}, "down", "--timeout", "5")
        return there

    def remove(node: str, _: Host) -> None:
        id_, secrets = containers.get(node, ""), transport.secrets(node, states[node].facts)
        script = Command.of("sh", "-c", _DOWN, "down", id_, secrets)
        if not force:
            script = _unless_runs(client, (node,) if id_ else (), script)
        done = lock.run(node, script, timeout=_DOCKER_TIMEOUT_S)
        _refused_by(done, node, "would be removed by tridock down")
        replace(done, command="remove the node").checked(node)

    client.hosts.each(remove)
    return there


def _unless_runs(client: NodeClient, nodes: Iterable[str], command: Command) -> Command:
    """Returns the command that the host carries out only if no run is in these of its nodes."""
    states = [client.states[node] for node in nodes]
    if not states:
        return command
    facts, ids = states[0].facts, [state.container.id for state in states if state.container is not None]
    check = ("sh", "-c", _UNLESS_RUNS, "unless-runs", f"{facts.uid}:{facts.gid}", _RUNS, *ids, "--")
    return replace(command, argv=(*check, *command.argv))


def _refused_by(done: Completed, node: str, fate: str) -> None:
    if done.exit_code == _IN_USE:
        lines = done.stdout.decode(errors="replace").splitlines()
        raise _in_use({node: [it.removeprefix(_RUN) for it in lines if it.startswith(_RUN)]}, fate)


def _in_use(runs_by_node: Mapping[str, Iterable[str]], fate: str) -> RequestError:
    return RequestError(
        Problem(node, f"its node {fate} while a run is active", ", ".join(runs), "stop the run first: tridock stop")
        for node, runs in runs_by_node.items()
    )


def _remove(transport: SshTransport, node: str, host: Host) -> Completed:
    return host.run(Command.of("docker", "rm", transport.container_name(node)), timeout=_DOCKER_TIMEOUT_S)


def _compose(
    client: NodeClient, lock: NodesLock, changed: tuple[str, ...], recipes: Mapping[str, str], *arguments: str
) -> None:
    hosts, twin = client.hosts, client.hosts.transport
    assert isinstance(twin, ComposeTransport)
    # Made here, as the operator: Docker would make a missing folder as root.
    for folder in _FOLDERS:
        (hosts.cluster.project_folder / folder).mkdir(exist_ok=True)
    override = hosts.cluster.state_folder / "compose.json"
    write_atomic(override, twin.override(recipes).encode())
    command = twin.command(client.states[hosts.head].facts, str(override), *arguments)
    done = lock.run(hosts.head, _unless_runs(client, changed, command), _DOCKER_TIMEOUT_S, LocalHost())
    _refused_by(done, hosts.head, "would be changed")
    if done.exit_code:
        _check_compose_plugin(LocalHost())
    replace(done, command="docker compose").checked("docker compose")


def _check_compose_plugin(host: Host) -> None:
    """Raises :class:`ClusterError` if the machine has no Compose: docker then complains of Compose's options."""
    done = host.run(Command.of("docker", "compose", "version"), timeout=_PROBE_TIMEOUT_S)
    if done.exit_code and done.exit_code != 127:  # no docker at all
        got = done.stderr.decode(errors="replace").strip().splitlines()[:1]
        todo = "install docker-compose-plugin (Debian and Ubuntu with Docker's packages) or docker-compose-v2"
        what = "the Compose plugin is missing on this machine"
        raise ClusterError(Problem("docker compose", what, "".join(got), f"{todo} (Ubuntu's own)"))


def _recipes(hosts: Hosts, states: States, image_id: str) -> dict[str, str]:
    return {node: hosts.transport.recipe(node, it.id_of(image_id), it.facts) for node, it in states.items()}


def _refuse_while_runs(client: NodeClient, nodes: tuple[str, ...], fate: str) -> None:
    live = [node for node in nodes if (container := client.states[node].container) is not None and container.running]

    def runs(node: str, _: Host) -> list[str]:
        done = client.run_inside(node, "sh", "-c", _RUNS, timeout=_PROBE_TIMEOUT_S).checked(node)
        return done.stdout.decode(errors="replace").splitlines()

    if busy := {node: found for node, found in client.hosts.each(runs, only=live).items() if found}:
        raise _in_use(busy, fate)


def _start(client: NodeClient, lock: NodesLock, ssh: SshTransport, node: str, host: Host, image_id: str) -> None:
    """Starts a host's node in place of one that is there."""
    state = client.states[node]
    if state.container is not None:
        remove = _unless_runs(client, (node,), Command.of("docker", "rm", "--force", state.container.id))
        done = lock.run(node, remove, timeout=_DOCKER_TIMEOUT_S)
        _refused_by(done, node, "would be replaced by tridock up")
        replace(done, command="docker rm").checked(node)
    start = ssh.run_command(node, state.id_of(image_id), state.facts)
    folders = [f"{ssh.workspace(state.facts)}/{name}" for name in _FOLDERS]
    made, written = Command.of("mkdir", "-p", "--", *folders), Command.of("touch", "--", folders[-1])
    line = f"{made.render()} && {written.render()} && {start.render()}"
    done = lock.run(node, Command.of("sh", "-c", line), timeout=_DOCKER_TIMEOUT_S)
    if done.exit_code and b"is already in use by container" not in done.stderr:
        # A container that could not start stays behind as "created", and would be in the way of the next try.
        _remove(ssh, node, host)
    replace(done, command=shortened(start)).checked(node)


def _wait_ready(client: NodeClient, node: str, host: Host) -> None:
    """Waits until the node's sshd answers; a container that has ended gives its last output instead."""
    name, deadline = client.hosts.transport.container_name(node), clock.now() + READY_TIMEOUT_S
    check = client.inside(node, "sh", "-c", _READY)
    if isinstance(client.hosts.transport, SshTransport):
        # A node that was ready once starts again with its host and its Docker engine.
        keep_up = Command.of("docker", "update", "--restart", "unless-stopped", name)
        line = f"{check.render()} && {keep_up.render()}"
        check = Command.of("sh", "-c", line)
    while (probe := host.run(check, timeout=_PROBE_TIMEOUT_S)).exit_code:
        inspect = Command.of("docker", "container", "inspect", "--format", "{{.State.Running}}", name)
        running = host.run(inspect, timeout=30.0).stdout.decode().strip() == "true"
        if not running or clock.now() > deadline:
            if running and probe.stderr.strip():  # a check that cannot run says nothing of sshd
                replace(probe, command="its health check").checked(node)
            raise ClusterError(_not_ready(client, node, host, name, running))
        time.sleep(0.2)


def _not_ready(client: NodeClient, node: str, host: Host, name: str, running: bool) -> Problem:
    logs = host.run(Command.of("docker", "logs", "--tail", "5", name), timeout=30.0)
    output = " | ".join((logs.stdout + logs.stderr).decode(errors="replace").split("\n")).strip(" |")
    todo = f"look at docker logs {name} there, then run tridock up again"
    if not running and isinstance(client.hosts.transport, SshTransport):
        # Nothing half-started stays behind: a dead container would only be in the way of the next try.
        _remove(client.hosts.transport, node, host)
        todo = "fix that, then run tridock up again"
        with suppress(ValueError):  # another program's output
            return decode(Problem, logs.stdout)  # the entrypoint's error
    what = "its sshd did not answer in time" if running else "its node ended at once"
    return Problem(node, what, output or "no output", todo)
