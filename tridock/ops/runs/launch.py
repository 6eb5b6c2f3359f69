"""A launch: experiment and cluster to a run that goes on at the head, on its own, until it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.errors import TridockError
from tridock.experiment import Experiment, load_experiment
from tridock.launchers import RunBundle, RunRequest, Ssh, default_port, make_bundle
from tridock.ops.doctor import check_quickly
from tridock.ops.hosts.nodes import ensure_up
from tridock.ops.hosts.session import Session
from tridock.ops.runs.planning_assumptions import told, with_hosts_gpu
from tridock.ops.runs.preflight import check_nodes
from tridock.ops.runs.provenance import Approve, origin
from tridock.ops.sync import choose, sync
from tridock.plan import Assessment, Plan, assess
from tridock.remote import Host, LocalHost

_TIMEOUT_S = 60.0
DEFAULT_CONFIG = "configs/demo.yaml"
DEMO_DATA = "data/demo"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked to run, already checked against the cluster: nothing has been contacted."""

    config: Path
    experiment: Experiment
    assessment: Assessment
    run_id: str
    force: bool = False
    """Start although the plan says that it does not fit."""

    @property
    def plan(self) -> Plan:
        return self.assessment.laid_out


def make_request(session: Session, config: Path, overrides: Sequence[str] = (), *, force: bool = False) -> Request:
    """Reads and checks the experiment on the cluster's slots; every problem in one :class:`RequestError`."""
    experiment = load_experiment(config, overrides)
    assessment = assess(experiment, session.cluster.slots, str(config), told(session.cluster))
    assessment.checked(force=force)
    return Request(config, experiment, assessment, run_folder.new_run_id(experiment.name), force)


def on_the_hosts_gpus(session: Session, request: Request) -> Request:
    """The request once more, planned on the hosts' own GPUs where nobody named them. Contacts the hosts.

    Raises :class:`RequestError` where the experiment does not fit those.
    """
    known = with_hosts_gpu(request.assessment.assumptions, session)
    assessment = assess(request.experiment, session.cluster.slots, str(request.config), known)
    assessment.checked(force=request.force)
    return replace(request, assessment=assessment)


def preview(session: Session, request: Request) -> RunBundle:
    """The run as it would start, from what is known without contacting a host."""
    port = request.experiment.launch.master_port or default_port(request.run_id)
    return _bundle(session, request, port, _manifest(session, None))


def bring_demo_data(session: Session) -> str:
    """Makes the demo's data set where it is missing, here and on the hosts; returns a line that says what lies where.

    Only for a launch that names no experiment: other data sets may be large: `fab data` brings those.
    """
    folder = session.cluster.project_folder / DEMO_DATA
    make = Command.of(sys.executable, "-m", "tridock.cli", "data", "demo", "--folder", str(folder))
    done = LocalHost().run(make, timeout=None).checked("demo data")

    def lacks(node: str, host: Host) -> bool:
        files = [f"{session.workspace(node)}/{DEMO_DATA}/stdlib_text_document{suffix}" for suffix in (".bin", ".idx")]
        there = Command.of("sh", "-c", 'test -r "$1" && test -r "$2"', "sh", *files)
        return host.run(there, timeout=_TIMEOUT_S).exit_code != 0

    lacking = tuple(node for node, missing in session.each(lacks).items() if missing)
    if lacking:
        synced = sync(session, choose(session.cluster.project_folder, [DEMO_DATA]), only=lacking)
        if failure := synced.failure:
            raise failure
    return done.stdout.decode().splitlines()[-1]


def launch(
    session: Session,
    request: Request,
    *,
    check: bool = True,
    approve: Approve | None = None,
) -> RunBundle:
    """Brings the nodes up, checks what the run needs, puts its folder on every node and starts it on the head.

    ``check`` is the doctor's quick part; without it only the run's own files and its port are looked at. ``approve``
    is given the run's manifest and plan before anything is written, and may raise.
    """
    image_id = ensure_up(session)
    if check:
        check_quickly(session)
    found = check_nodes(session, request.config, request.experiment, request.plan)
    manifest = {**_manifest(session, image_id), "image_manifest": found.image_manifest}
    bundle = _bundle(session, request, found.port, {**manifest, **found.data})
    if approve is not None:
        approve(*(json.loads(bundle.files[name]) for name in (run_folder.MANIFEST, run_folder.PLAN)))

    def put(node: str, host: Host) -> None:
        host.put_tree(bundle.files, f"{session.workspace(node)}/runs/{request.run_id}", mode=0o644)

    def forget(node: str, host: Host) -> None:
        host.run(Command.of("rm", "-rf", f"{session.workspace(node)}/runs/{request.run_id}"), timeout=_TIMEOUT_S)

    try:
        session.each(put)
    except TridockError:
        # A folder on some of the nodes would be a run that never starts.
        with suppress(TridockError):
            session.each(forget)
        raise
    session.node_verb(session.head, "start", bundle.path, timeout=_TIMEOUT_S).checked(session.head)
    return bundle


def _bundle(session: Session, request: Request, port: int, manifest: dict[str, object]) -> RunBundle:
    about = RunRequest(
        request.experiment,
        request.assessment,
        session.cluster.slots,
        run_id=request.run_id,
        master_addr=session.cluster.address_of(session.head),
        master_port=port,
        spares=session.cluster.spares,
        manifest={**manifest, "config": str(request.config), "seed": request.experiment.train.seed},
    )
    return make_bundle(about, Ssh())


def _manifest(session: Session, image_id: str | None) -> dict[str, object]:
    """Where the run comes from."""
    return {
        **origin(session.cluster.project_folder),
        "cluster": session.cluster.name,
        "hostfile": session.cluster.hostfile.render(),
        "image": session.cluster.settings.image,
        "image_id": image_id,
    }
