"""A launch: experiment and cluster to a run that goes on at the head, on its own, until it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tridock import run_folder
from tridock.cluster.containers import workspace_on_host
from tridock.command import Command
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.experiment import Experiment, load_experiment
from tridock.launchers import RunBundle, make_bundle
from tridock.launchers.bundle import default_port
from tridock.ops.nodes import up
from tridock.ops.origin import origin
from tridock.ops.push import push
from tridock.ops.session import Session
from tridock.plan import Plan, make_plan
from tridock.remote import Host, LocalHost

_TIMEOUT_S = 60.0
DEMO_DATA = "data/demo"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked to run, already checked against the cluster: nothing has been contacted."""

    config: Path
    experiment: Experiment
    plan: Plan
    run_id: str


def make_request(session: Session, config: Path, overrides: Sequence[str] = ()) -> Request:
    """Reads and checks the experiment on the cluster's slots; every problem in one :class:`RequestError`."""
    experiment = load_experiment(config, overrides)
    plan = make_plan(experiment, session.cluster.slots, str(config))
    return Request(config, experiment, plan, run_folder.new_run_id(experiment.name))


def preview(session: Session, request: Request) -> RunBundle:
    """The run as it would start, from what is known without contacting a host."""
    port = request.experiment.launch.master_port or default_port(request.run_id)
    return _bundle(session, request, port, _manifest(session, None))


def bring_demo_data(session: Session) -> str:
    """Makes the demo's data set where it is missing, here and on the hosts; returns a line that says what lies where.

    Only for a launch that names no experiment: other data sets may be large, and are pushed when asked to.
    """
    folder = session.cluster.project_folder / DEMO_DATA
    make = Command.of(sys.executable, "-m", "tridock.cli", "data", "demo", "--folder", str(folder))
    done = LocalHost().run(make, timeout=None).checked("demo data")

    def lacks(node: str, host: Host) -> bool:
        workspace = workspace_on_host(session.cluster, session.states()[node].facts)
        files = [f"{workspace}/{DEMO_DATA}/stdlib_text_document{suffix}" for suffix in (".bin", ".idx")]
        there = Command.of("sh", "-c", 'test -r "$1" && test -r "$2"', "sh", *files)
        return host.run(there, timeout=_TIMEOUT_S).exit_code != 0

    lacking = tuple(node for node, missing in session.each(lacks).items() if missing)
    if lacking:
        push(session, Path(DEMO_DATA), only=lacking)
    return done.stdout.decode().splitlines()[-1]


def launch(session: Session, request: Request) -> RunBundle:
    """Brings the nodes up, checks what the run needs, puts its folder on every node and starts it on the head."""
    image_id = up(session)
    data_sha256 = _require_data(session, request)
    port = _choose_port(session, request)
    bundle = _bundle(session, request, port, {**_manifest(session, image_id), "data_sha256": data_sha256})

    def put(node: str, host: Host) -> None:
        workspace = workspace_on_host(session.cluster, session.states()[node].facts)
        host.put_tree(bundle.files, f"{workspace}/runs/{request.run_id}", mode=0o644)

    def forget(node: str, host: Host) -> None:
        workspace = workspace_on_host(session.cluster, session.states()[node].facts)
        host.run(Command.of("rm", "-rf", f"{workspace}/runs/{request.run_id}"), timeout=_TIMEOUT_S)

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
    return make_bundle(
        request.experiment,
        request.plan,
        session.cluster.slots,
        run_id=request.run_id,
        master_addr=session.cluster.address_of(session.head),
        master_port=port,
        manifest={**manifest, "config": str(request.config), "seed": request.experiment.train.seed},
    )


def _require_data(session: Session, request: Request) -> dict[str, str]:
    """Refuses before any rank starts where a node lacks the data or has others than the head; returns their hashes.

    The index stands for the data set: it holds every document's length.
    """
    prefix = request.experiment.data.data_path
    script = 'for file; do if [ -r "$file" ]; then continue; fi; echo "missing $file"; done; sha256sum "$2" 2>/dev/null'

    def look(node: str, host: Host) -> list[str]:
        command = session.inside(node, "sh", "-c", f"{script}; exit 0", "sh", f"{prefix}.bin", f"{prefix}.idx")
        return host.run(command, timeout=_TIMEOUT_S).checked(node).stdout.decode().splitlines()

    found = session.each(look)
    where, first = f"{request.config}: data.data_path", found[session.head]
    todo = f"bring the data to the nodes: fab push --hosts {session.cluster.hostfile_path} --path {Path(prefix).parent}"
    problems = []
    for node, lines in found.items():
        missing = [line.removeprefix("missing ") for line in lines if line.startswith("missing ")]
        if missing:
            problems.append(Problem(where, f"is not on node {node}", ", ".join(missing), todo))
        elif lines != first and not first[0].startswith("missing "):
            problems.append(Problem(where, f"has another content on node {node} than on the head", lines[0], todo))
    if problems:
        raise RequestError(problems)
    return {f"{prefix}.idx": first[0].split()[0]}


def _choose_port(session: Session, request: Request) -> int:
    """The experiment's port if it is free on the head, else a free one found there."""
    wanted = request.experiment.launch.master_port
    words = ("port",) if wanted is None else ("port", str(wanted))
    done = session.node_verb(session.head, *words, timeout=_TIMEOUT_S)
    if done.exit_code == 0:
        return int(done.stdout)
    told = Problem.parse(done.stderr.decode(errors="replace"))
    if told is None:
        done.checked(session.head)
    elif wanted is None:
        raise ClusterError(Problem(f"{session.head}: {told.where}", told.what, told.got, told.todo))
    else:
        where, what = f"{request.config}: launch.master_port", f"{told.where} {told.what} on {session.head}"
        raise ClusterError(Problem(where, what, told.got, "change it or leave it out"))
    raise AssertionError("a port was found, or why there is none")


def _manifest(session: Session, image_id: str | None) -> dict[str, object]:
    """Where the run comes from; with an image id, also what is in the image (read on the head)."""
    manifest: dict[str, object] = {
        **origin(session.cluster.project_folder),
        "cluster": session.cluster.name,
        "hostfile": session.cluster.hostfile.render(),
        "image": session.cluster.settings.image,
        "image_id": image_id,
    }
    if image_id is not None:
        read = session.inside(session.head, "cat", f"{run_folder.CODE}/manifest.json")
        done = session.hosts[session.head].run(read, timeout=_TIMEOUT_S)
        manifest["image_manifest"] = json.loads(done.stdout) if done.exit_code == 0 else None
    return manifest
