"""From a prepared run to its start on the nodes of a cluster."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tridock.cluster.settings import Cluster
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.node_answers import PlacedCode, QueuedRun
from tridock.contracts.supervision import Supervision
from tridock.errors import TridockError
from tridock.experiment import CommandExperiment
from tridock.launchers.run import RunBundle, make_bundle
from tridock.launchers.ssh import Ssh
from tridock.ops.checks.quick import check_quickly
from tridock.ops.hosts.attached import NodesLock
from tridock.ops.hosts.client import NODE, NodeClient
from tridock.ops.nodes.containers import ensure_up, kept_up
from tridock.ops.runs.checkpoint_to_load import lacking_files
from tridock.ops.runs.cluster_runs import (
    list_runs,
    refuse_others,
    refuse_slots_in_use,
    require_queue_node,
    slots_in_use,
)
from tridock.ops.runs.code import ARCHIVE_END, Code, archive_member, archive_of
from tridock.ops.runs.neighbours import devices_of, on_our_slots, refuse_slots_of_neighbours
from tridock.ops.runs.prepared import Preflight, Prepared
from tridock.ops.runs.provenance import Approve, provenance
from tridock.ops.runs.removal import remove_interrupted, withdraw
from tridock.ops.runs.trackers import RunTrackers, check_on_head, trackers_of
from tridock.remote import Host, on_all

_SEND_S = 600.0


def put_files(client: NodeClient, bundle: RunBundle, code: Code | None) -> None:
    """Writes a run's first files and its code on every node; sends only the files of code that the node lacks."""
    store = f"{run_folder.WORKSPACE}/runs/{run_folder.CODE_STORE}"
    # The last file tells the node that nothing is missing.
    files = sorted(bundle.files.items(), key=lambda it: it[0] == run_folder.SUPERVISION)
    files.insert(0, (run_folder.INCOMPLETE, b""))
    packed = b"".join((*(archive_member(*it) for it in files), ARCHIVE_END))

    def send(node: str, host: Host) -> None:
        # The node writes them itself: on many hosts every process of a shell counts.
        place = client.inside(node, *NODE, "place-code", "--files", bundle.path, interactive=True)
        done = host.pipe((packed,), place, timeout=_SEND_S)
        done = replace(done, command=f"write into {host_folder(client, node, bundle)}")
        missing = client.answer(node, PlacedCode, "place-code", done).missing
        if missing and code is not None:
            receive = client.inside(node, *NODE, "receive-files", store, interactive=True)
            host.pipe(archive_of(code, missing), receive, timeout=_SEND_S).checked(node)
            argv = ("place-code", bundle.path)
            placed = client.ask(node, PlacedCode, *argv, stdin=code.index.encode(), timeout=_SEND_S)
            if placed.missing:
                raise code.not_whole(placed.missing, f", on {node}")

    client.hosts.each(send)


def host_folder(client: NodeClient, node: str, bundle: RunBundle) -> str:
    """Returns the run's folder on a node's host."""
    return f"{client.workspace(node)}/runs/{bundle.run_id}"


_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 180.0


def preview(cluster: Cluster, prepared: Prepared) -> RunBundle:
    """Returns the run as it would start, from what is known without contacting a host."""
    return _bundle(cluster, prepared, prepared.port)


def launch(
    client: NodeClient,
    prepared: Prepared,
    *,
    check: bool = True,
    share: bool = False,
    queue: bool = False,
    approve: Approve | None = None,
) -> tuple[RunBundle, NodeClient]:
    """Brings the nodes up, checks what the run needs, writes its files on all of them and starts it on the head.

    ``check`` runs the doctor's quick checks first; without it only the run's own files and its port are checked.
    ``share`` allows slots that another run has in use; with ``queue`` the run waits for them. ``approve`` is called
    with the run's manifest and plan before any file of the run is written, and may raise. An error or Ctrl-C leaves no
    file of it behind, as long as the head can say that the run has not started; those of a checkpoint that came stay.
    Returns a client of the nodes that are up, too.
    """
    trackers = trackers_of(prepared.experiment)
    if queue:
        require_queue_node(client.hosts)
    image_id, client = ensure_up(client)
    answers: list[Preflight] = []
    questions: list[Callable[[], object]] = []
    if not share and not queue:
        questions += [lambda: refuse_slots_in_use(client), lambda: refuse_slots_of_neighbours(client)]
    if (bring := lacking_files(client, prepared.experiment)) is not None:
        for refuse in questions:  # before what may take long
            refuse()
        bring()
    is_busy = queue and bool(slots_in_use(client) or (not share and on_our_slots(client)))
    if check and not is_busy:  # busy devices would fail the checks
        on_cpu = prepared.experiment.env.get("DS_ACCELERATOR") == "cpu"
        questions.append(lambda: check_quickly(client, on_cpu=on_cpu))
    questions.append(lambda: check_on_head(client, trackers))
    questions.append(lambda: answers.append(prepared.check_nodes(client)))
    _ask_at_once(client, questions)
    (found,) = answers
    about = {"image_id": image_id, "image_manifest": found.image_manifest, **found.data}
    prepared = replace(prepared, devices={} if share else devices_of(client), queued=queue)
    bundle = _bundle(client.cluster, prepared, found.port, **about)
    if approve is not None:
        approve(*(json.loads(bundle.files[name]) for name in (run_folder.MANIFEST, run_folder.PLAN)))
    with kept_up(client.hosts, image_id) as (lock, client):
        runs = list_runs(client)
        remove_interrupted(client, runs)
        if not share and not queue:
            refuse_slots_in_use(client, runs)
            refuse_slots_of_neighbours(client)
        try:
            put_files(client, bundle, prepared.code)
            started = start(client, lock, bundle, trackers, queue=queue)
        except (TridockError, KeyboardInterrupt):
            # Folders on only some nodes would look like a run that never starts.
            with suppress(TridockError):
                if withdraw(client, bundle.run_id):
                    print(f"run {bundle.run_id} has started, or is queued; see tridock status", file=sys.stderr)
            raise
        return started, client


def _ask_at_once(client: NodeClient, questions: Sequence[Callable[[], object]]) -> None:
    asked = {str(number): question for number, question in enumerate(questions)}
    outcomes = on_all(dict.fromkeys(asked, client.hosts[client.head]), lambda it, _: asked[it](), len(asked))
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error


def launch_again(
    client: NodeClient,
    run_id: str,
    supervision: Supervision,
    experiment: CommandExperiment,
    *,
    check: bool,
    share: bool,
    force: bool,
) -> tuple[RunBundle, NodeClient]:
    """Starts a run of the user's own program again: in its folder, with its resume command if it has one, and one that
    somebody else has started only with ``force``. Returns as :func:`launch` does."""
    trackers = trackers_of(experiment)
    image_id, client = ensure_up(client)
    supervision = replace(supervision, devices={} if share else devices_of(client), queued=False)
    files = {run_folder.SUPERVISION: supervision.to_json().encode()}
    bundle = RunBundle(run_id, f"{run_folder.WORKSPACE}/runs/{run_id}", Command(experiment.command), files)
    check_on_head(client, trackers)
    if check:
        check_quickly(client, on_cpu=experiment.env.get("DS_ACCELERATOR") == "cpu")
    with kept_up(client.hosts, image_id) as (lock, client):
        runs = list_runs(client)
        if not force:
            refuse_others(run for run in runs if run.run_id == run_id)
        if not share:
            refuse_slots_in_use(client, runs)
            refuse_slots_of_neighbours(client)
        packed = b"".join((*(archive_member(*it) for it in files.items()), ARCHIVE_END))
        receive = ("receive-files", bundle.path)
        client.hosts.each(lambda node, _: client.node_verb(node, *receive, stdin=packed, timeout=_SEND_S).checked(node))
        return start(client, lock, bundle, trackers, again=True), client


def start(
    client: NodeClient,
    lock: NodesLock,
    bundle: RunBundle,
    trackers: RunTrackers,
    *,
    queue: bool = False,
    again: bool = False,
) -> RunBundle:
    """Starts a run on the head, ``again`` if it has ended, or queues it; sends its trackers' secrets over stdin."""
    secrets = json.dumps(dict(trackers.secrets)).encode() if trackers.secrets else None
    options = ("--secrets",) if secrets else ()
    if queue:
        argv = ("enqueue", bundle.path, *options)
        done = lock.node_verb(client, *argv, stdin=secrets, timeout=_QUEUE_TIMEOUT_S)
        queued = client.answer(client.head, QueuedRun, argv[0], done)
        _share_secrets(client, bundle, secrets)
        return replace(bundle, waits_for=None if queued.started else queued.waits_for)
    argv = ("start", bundle.path, *options, *(("--again",) if again else ()))
    lock.node_verb(client, *argv, stdin=secrets, timeout=_TIMEOUT_S).checked(client.head)
    _share_secrets(client, bundle, secrets)
    return bundle


def _share_secrets(client: NodeClient, bundle: RunBundle, secrets: bytes | None) -> None:
    """Sends the secrets of a started run to the nodes that may supervise it if the head is lost."""
    supervision = bundle.supervision
    if secrets is None or not supervision.may_be_taken_over:
        return

    def keep(node: str, _: Host) -> None:
        client.node_verb(node, "keep-secrets", bundle.path, stdin=secrets, timeout=_TIMEOUT_S).checked(node)

    try:
        client.hosts.each(keep, only=supervision.remote)
    except TridockError as error:
        print(f"warning: without the head this run would be sent to no tracker or address: {error}", file=sys.stderr)


def _bundle(cluster: Cluster, prepared: Prepared, port: int, **own: object) -> RunBundle:
    about = {"cluster": cluster.name, "hostfile": cluster.hostfile.render(), "image": cluster.settings.image}
    run = replace(
        prepared,
        master_port=port,
        manifest={**provenance(cluster.project_folder), **about, **own, **prepared.manifest},
        master_addr=cluster.node(cluster.head).address,
        spares=cluster.spares,
        addresses={node.name: node.address for node in cluster.nodes},
    )
    return make_bundle(run, Ssh())
