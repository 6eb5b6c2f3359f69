"""Checks of each host: whether it answers, its node, the image of that node, and its keys."""

from tridock.errors import ClusterError, Problem
from tridock.ops.doctor.consistency_checks import image_findings
from tridock.ops.doctor.finding import KEYS, UP, Report, fail, warn
from tridock.ops.hosts.facts import keys_digest
from tridock.ops.hosts.keys import KeyStore
from tridock.ops.hosts.nodes import outdated
from tridock.ops.hosts.session import NODE, Session
from tridock.ops.image.ensure import wanted_image


def check_hosts(session: Session, report: Report) -> Session:
    """The session with the hosts that answer; their nodes are asked for their reports too."""
    session.ask_with_states(*NODE, "node-report")
    there, failure = session.reachable()
    for problem in failure.problems if failure else ():
        report.findings.append(fail("hosts", problem, "its node cannot be looked at, started or stopped"))
    report.seen["hosts"] = f"{len(there.nodes)} of {len(session.nodes)} answer"
    return there


def check_containers(session: Session, report: Report) -> tuple[str, ...]:
    """The nodes that run; what their containers are made of, and the keys that their hosts hold."""
    cluster, states = session.cluster, session.states()
    todo = f"run tridock up {cluster.hosts_option}"
    images = {}
    for node, state in states.items():
        if state.container is None:
            problem = Problem(node, "has no node", f"no container {session.transport.container_name(node)}", todo)
        elif not state.container.running:
            problem = Problem(node, "its node is not running", f"exited with {state.container.exit_code}", todo)
        else:
            images[node] = state.container.image_id
            continue
        report.findings.append(fail("nodes", problem, "a launch starts its ranks in it", UP))
    report.findings += image_findings(cluster.hosts_option, images) if images else ()
    report.seen["nodes"] = f"{len(images)} run"
    if images:
        report.seen["image"] = next(iter(images.values())).removeprefix("sha256:")[:12]
    _recipes(session, tuple(images), report)
    _keys(session, tuple(images), report)
    return tuple(images)


def _recipes(session: Session, up: tuple[str, ...], report: Report) -> None:
    try:
        old = outdated(session, wanted_image(session))
    except ClusterError as error:
        report.findings += [warn("image", problem, "tridock up could not start a node") for problem in error.problems]
        return
    todo = f"run tridock up {session.cluster.hosts_option}"
    for node in up:
        if node in old and not report.fails("image"):
            what = "its container is not what the settings and the image ask for now"
            why = "a launch replaces it first"
            report.findings.append(warn("nodes", Problem(node, what, "", todo), why, UP))


def _keys(session: Session, up: tuple[str, ...], report: Report) -> None:
    store = KeyStore(session.cluster)
    on_file = store.on_file(up)
    for node in up:
        files = on_file.get(node)
        if files is None or session.states()[node].keys != keys_digest(files):
            got = "none on file" if files is None else "others there" if session.states()[node].keys else "none there"
            todo = f"give all nodes the cluster's keys again: tridock keys {session.cluster.hosts_option}"
            problem = Problem(node, f"its keys are not those in {store.folder}", got, todo)
            report.findings.append(fail("ssh", problem, "the nodes of a cluster know each other by them", KEYS))
