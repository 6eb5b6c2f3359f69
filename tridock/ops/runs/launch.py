"""``tridock launch``: from an experiment and a cluster to a run on its nodes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tridock.command import Command
from tridock.launchers.bundle import RunBundle, default_port
from tridock.launchers.ssh import Ssh
from tridock.ops.hosts.nodes import ensure_up
from tridock.ops.hosts.session import Session
from tridock.ops.runs.preflight import Preflight, check_nodes
from tridock.ops.runs.prepare import Prepared, assumptions_for, prepare, with_hosts_gpu
from tridock.ops.runs.provenance import Approve
from tridock.ops.runs.sinks import with_cluster_sinks
from tridock.ops.runs.start import put_files
from tridock.ops.runs.start_on_nodes import start_on_nodes
from tridock.remote import Host

_TIMEOUT_S = 60.0
DEMO_DATA = "data/demo"
_DEMO_FILES = tuple(f"stdlib_text_document.{suffix}" for suffix in ("bin", "idx", "json"))


def prepare_on(session: Session, config: Path, overrides: Sequence[str] = (), *, force: bool = False) -> Prepared:
    """Returns the experiment prepared for the cluster's slots, as the settings describe them. Contacts no host."""
    cluster = session.cluster
    prepared = prepare(config, cluster.slots, assumptions_for(cluster), overrides, force=force)
    return replace(prepared, experiment=with_cluster_sinks(prepared.experiment, cluster.settings))


def on_hosts_gpus(session: Session, prepared: Prepared) -> Prepared:
    """Returns it for the hosts' own GPUs, if the settings name none. Contacts the hosts."""
    return prepared.replanned(with_hosts_gpu(prepared.assessment.assumptions, session))


def preview(session: Session, prepared: Prepared) -> RunBundle:
    """Returns the run as it would start, from what is known without contacting a host."""
    port = prepared.experiment.launch.master_port or default_port(prepared.run_id)
    return _bundle(session, prepared, port, image_id=None)


def bring_demo_data(session: Session) -> str:
    """Builds the demo data set on the head and copies it to the nodes that lack it; returns a line about it.

    Brings the nodes up first: the data set is built in the head's container, so the operator's machine needs no extra
    packages. Only for a launch that names no experiment: other data sets may be large and are copied by `tridock data
    sync`.
    """
    ensure_up(session)
    head = session.head
    make = session.inside(head, "tridock", "data", "demo", "--folder", DEMO_DATA)
    done = session.hosts[head].run(make, timeout=None).checked(head)

    def lacks(node: str, host: Host) -> bool:
        there = Command.of(
            "sh", "-c", 'cd "$1" && test -r "$2" && test -r "$3"', "sh", folder_of(node), *_DEMO_FILES[:2]
        )
        return host.run(there, timeout=_TIMEOUT_S).exit_code != 0

    def folder_of(node: str) -> str:
        return f"{session.workspace(node)}/{DEMO_DATA}"

    without_data = tuple(node for node, missing in session.each(lacks).items() if missing)
    if without_data:
        files = {name: session.hosts[head].get(f"{folder_of(head)}/{name}") for name in _DEMO_FILES}
        session.each(lambda node, host: host.put_tree(files, folder_of(node)), only=without_data)
    return done.stdout.decode().splitlines()[-1]


def launch(
    session: Session,
    prepared: Prepared,
    *,
    check: bool = True,
    share: bool = False,
    queue: bool = False,
    approve: Approve | None = None,
) -> RunBundle:
    """Brings the nodes up, checks what the run needs, puts its folder on every node and starts it on the head.

    ``check``, ``share``, ``queue`` and ``approve`` are those of :func:`start_on_nodes`. Without ``check`` only the
    run's own files and its port are checked.
    """

    def bundle_of(image_id: str, found: Preflight) -> RunBundle:
        with_data = replace(prepared, data=found.data)
        return _bundle(session, with_data, found.port, image_id=image_id, image_manifest=found.image_manifest)

    return start_on_nodes(
        session,
        prepared.experiment,
        lambda: check_nodes(session, prepared.config, prepared.experiment, prepared.plan),
        bundle_of,
        lambda bundle: put_files(session, bundle),
        check=check,
        share=share,
        queue=queue,
        approve=approve,
    )


def _bundle(session: Session, prepared: Prepared, port: int, **image: object) -> RunBundle:
    cluster = session.cluster
    about = {"cluster": cluster.name, "hostfile": cluster.hostfile.render(), "image": cluster.settings.image}
    return prepared.bundle(
        Ssh(),
        master_port=port,
        manifest=prepared.manifest(cluster.project_folder, **about, **image),
        master_addr=cluster.address_of(session.head),
        spares=cluster.spares,
        addresses={node.name: node.address for node in cluster.nodes},
    )
