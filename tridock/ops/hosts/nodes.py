"""Nodes up and down: one container a host, made from the cluster's recipe, ready when its sshd answers."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from tridock.cluster.transports import ComposeTransport, SshTransport
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.run_folder import write_atomic
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.attached import nodes_locked
from tridock.ops.hosts.facts import HostState, keys_digest
from tridock.ops.hosts.keys import KeyStore, distribute_keys
from tridock.ops.hosts.session import NODE, Session
from tridock.ops.image.ensure import ensure_image, image_of_hosts, lacking, local_image_id, verify
from tridock.ops.image.wrap import ensure_wrapped
from tridock.remote import Completed, Host, LocalHost
from tridock.remote.host import shortened

READY_TIMEOUT_S = 60.0
_DOCKER_TIMEOUT_S = 120.0

# The health check of a container that is no node passes too: sshd must have written its pid first.
_PROBE = f"test -e {run_folder.SSHD_PID} && healthcheck.sh"
_READY = ("sh", "-c", _PROBE)
_SOON_READY = f"for n in 1 2 3 4 5 6 7 8 9 10; do ! {{ {_PROBE}; }} || exit 0; sleep 0.2; done; exit 1"
_PROBE_TIMEOUT_S = 30.0
_STEP = "tridock: done"

# Made here, as the operator: Docker would make a missing folder as root.
_FOLDERS = ("data", "runs")
_DOWN = '[ -z "$1" ] || docker rm --force "$1" || exit; shift; rm -rf -- "$@"'


def up(session: Session) -> str:
    """Provides missing or outdated keys, images and nodes; leaves current ones alone. Returns the image's id."""
    ensure_wrapped(session.cluster)
    session.keeps_shells = True
    local: list[str | None] = []
    with nodes_locked(session, lambda: local.append(local_image_id(session.cluster.settings.image))):
        image_id = image_of_hosts(session, *local)
        sends = bool(lacking(session, image_id))
        if not sends:
            _up(session, image_id)
    if sends:  # which takes its time: not under the lock
        image_id = ensure_image(session)
        with nodes_locked(session):
            session.forget_states()
            verify(session, image_id)
            _up(session, image_id)
    session.forget_states()
    return image_id


def ask_whether_ready(session: Session) -> None:
    """Lets the command that reads a host's facts ask whether its node is ready too, for :func:`up`."""
    session.ask_with_states(*_READY)


def _up(session: Session, image_id: str) -> None:
    recipes = _recipes(session, image_id)
    stale = _stale(session, recipes)
    _refuse_while_runs(session, stale, "would be replaced by tridock up")
    store = distribute_keys(session)  # to all before any node starts: a host that cannot hold them leaves none behind
    match session.transport:
        case ComposeTransport() as twin:
            _compose(session, twin, recipes, "up", "--detach", "--no-build", "--quiet-pull", *session.nodes)
            ready = dict.fromkeys(session.nodes, False)
        case SshTransport() as ssh:
            ready = session.each(lambda node, host: _start(session, ssh, store, node, host, image_id, node in stale))
    session.each(lambda node, host: _wait_ready(session, node, host), only=tuple(it for it in ready if not ready[it]))


def ensure_up(session: Session) -> str:
    """Like :func:`up`. If every node is current, it only reads the hosts' facts."""
    image_id = ensure_image(session)
    store = KeyStore(session.cluster)
    store.ensure()
    stale = _stale(session, _recipes(session, image_id))

    def is_right(node: str) -> bool:
        state = session.states()[node]
        healthy = state.container is not None and state.container.health == "healthy"
        return healthy and node not in stale and _has_keys(store, node, state)

    return image_id if all(map(is_right, session.nodes)) else up(session)


def _has_keys(store: KeyStore, node: str, state: HostState) -> bool:
    return state.keys == keys_digest(store.node_files(node))


def outdated(session: Session, image_id: str) -> tuple[str, ...]:
    """The nodes whose container :func:`up` would replace or start again."""
    return _stale(session, _recipes(session, image_id))


def down(session: Session, *, force: bool = False) -> tuple[str, ...]:
    """Removes the nodes (and their keys on the hosts); runs' folders and data stay. Returns the nodes removed."""
    with nodes_locked(session):
        return _down(session, force)


def _down(session: Session, force: bool) -> tuple[str, ...]:
    session.reads_keys, session.keeps_shells = False, True
    if not force:
        session.ask_with_states(*NODE, "processes")  # for _refuse_while_runs
    there = tuple(node for node, state in session.states().items() if state.container is not None)
    running = tuple(node for node in there if (c := session.states()[node].container) and c.running)
    if not force:
        _refuse_while_runs(session, running, "would be removed by tridock down")
    transport = session.transport
    if isinstance(transport, ComposeTransport):
        _compose(session, transport, {}, "down", "--timeout", "5")
        return there

    def remove(node: str, host: Host) -> None:
        state = session.states()[node]
        remains = (transport.secrets(node, state.facts), transport.image_paths(node, state.facts)[0])
        name = transport.container_name(node) if state.container is not None else ""
        done = host.run(Command.of("sh", "-c", _DOWN, "down", name, *remains), timeout=_DOCKER_TIMEOUT_S)
        replace(done, command="remove the node").checked(node)

    session.each(remove)
    return there


def _remove(transport: SshTransport, node: str, host: Host) -> Completed:
    command = Command.of("docker", "rm", "--force", transport.container_name(node))
    return host.run(command, timeout=_DOCKER_TIMEOUT_S)


def _compose(session: Session, twin: ComposeTransport, recipes: Mapping[str, str], *arguments: str) -> None:
    cluster, override = session.cluster, session.cluster.state_folder / "compose.json"
    # Made here, as the operator: Docker would make a missing folder as root.
    for folder in _FOLDERS:
        (cluster.project_folder / folder).mkdir(exist_ok=True)
    write_atomic(override, twin.override(recipes).encode())
    facts = session.states()[session.head].facts
    command = twin.command(facts, str(override), *arguments)
    LocalHost().run(command, timeout=_DOCKER_TIMEOUT_S).checked("docker compose")


def _recipes(session: Session, image_id: str) -> dict[str, str]:
    """Returns the recipe that each node's container should have."""
    states = session.states()
    return {node: session.transport.recipe(node, state.id_of(image_id), state.facts) for node, state in states.items()}


def _stale(session: Session, recipes: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the nodes whose container does not match the settings."""
    return tuple(
        node
        for node, state in session.states().items()
        if (container := state.container) is not None and not (container.running and container.recipe == recipes[node])
    )


def _refuse_while_runs(session: Session, nodes: tuple[str, ...], fate: str) -> None:
    from tridock.ops.runs.registry import active_runs

    containers = {node: state.container for node, state in session.states().items()}
    live = tuple(node for node in nodes if (container := containers[node]) is not None and container.running)
    busy = {node: runs for node, runs in active_runs(session, live).items() if runs}
    if busy:
        raise RequestError(
            Problem(node, f"its node {fate} while a run is active", ", ".join(runs), "stop the run first: tridock stop")
            for node, runs in busy.items()
        )


def _start(
    session: Session, ssh: SshTransport, store: KeyStore, node: str, host: Host, image_id: str, stale: bool
) -> bool:
    """Starts a host's node, in one command, if it is missing or stale. Returns whether it is known to be ready."""
    state = session.states()[node]
    if not stale and state.container is not None:
        # An answer from before its sshd read other keys says nothing.
        return (
            _has_keys(store, node, state) and session.run_inside(node, *_READY, timeout=_PROBE_TIMEOUT_S).exit_code == 0
        )
    steps: list[tuple[str, str]] = []
    start = ssh.run_command(node, state.id_of(image_id), state.facts)
    if stale:
        remove = Command.of("docker", "rm", "--force", ssh.container_name(node))
        steps.append((shortened(remove), remove.render()))
    folders = Command.of("mkdir", "-p", "--", *(f"{ssh.workspace(state.facts)}/{name}" for name in _FOLDERS))
    steps.append((shortened(start), f"{folders.render()} && {start.render()}"))
    steps.append(("", session.inside(node, "sh", "-c", _SOON_READY).render()))
    # Each step prints a line after its output, so that a failed one is known.
    line = " && ".join(f"{line} && echo {_STEP}" for _, line in steps)
    done = host.run(Command.of("sh", "-c", line), timeout=2 * _DOCKER_TIMEOUT_S)
    passed = done.stdout.decode(errors="replace").splitlines().count(_STEP)
    if done.exit_code == 0 or passed == len(steps) - 1:
        return done.exit_code == 0
    what = steps[passed][0]
    if what == shortened(start) and b"is already in use by container" not in done.stderr:
        # A container that could not start stays behind as "created", and would be in the way of the next try.
        _remove(ssh, node, host)
    replace(done, command=what).checked(node)
    return False


def _wait_ready(session: Session, node: str, host: Host) -> None:
    """Waits until the node's sshd answers; a container that has ended gives its last output instead."""
    name, deadline = session.transport.container_name(node), time.monotonic() + READY_TIMEOUT_S
    while True:
        if host.run(session.inside(node, *_READY), timeout=_PROBE_TIMEOUT_S).exit_code == 0:
            return
        inspect = Command.of("docker", "container", "inspect", "--format", "{{.State.Running}}", name)
        running = host.run(inspect, timeout=30.0).stdout.decode().strip() == "true"
        if not running or time.monotonic() > deadline:
            raise ClusterError(_not_ready(session, node, host, name, running))
        time.sleep(0.2)


def _not_ready(session: Session, node: str, host: Host, name: str, running: bool) -> Problem:
    logs = host.run(Command.of("docker", "logs", "--tail", "5", name), timeout=30.0)
    output = " | ".join((logs.stdout + logs.stderr).decode(errors="replace").split("\n")).strip(" |")
    todo = f"look at docker logs {name} there, then run tridock up again"
    if not running and isinstance(session.transport, SshTransport):
        # Nothing half-started stays behind: a dead container would only be in the way of the next try.
        _remove(session.transport, node, host)
        todo = "fix that, then run tridock up again"
        with suppress(ValueError):  # another program's output
            return decode(Problem, logs.stdout)  # the entrypoint's error
    what = "its sshd did not answer in time" if running else "its node ended at once"
    return Problem(node, what, output or "no output", todo)
