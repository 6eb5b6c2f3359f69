"""``tridock run``: your own program on a cluster's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.node_answers import PlacedCode, PreflightAnswer
from tridock.errors import ClusterError, Problem, RequestError
from tridock.experiment import load_command
from tridock.experiment.command import CommandExperiment
from tridock.launchers.bundle import RunBundle, default_port
from tridock.launchers.command import CommandRun, make_command_bundle
from tridock.ops.hosts.session import NODE, Session
from tridock.ops.runs.code import ARCHIVE_END, Code, archive_member, archive_of, code_of_run, read_code
from tridock.ops.runs.provenance import Approve, provenance
from tridock.ops.runs.sinks import with_cluster_sinks
from tridock.ops.runs.start import first_files, host_folder, refuse_other_contract
from tridock.ops.runs.start_on_nodes import start_on_nodes
from tridock.remote import Host

_TIMEOUT_S = 60.0
_CODE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PreparedCommand:
    """A program with its code, under this run id."""

    experiment: CommandExperiment
    code: Code
    run_id: str


def prepare(session: Session, experiment: CommandExperiment, folder: Path) -> PreparedCommand:
    """Reads the code and checks the command line; contacts no host. Raises :class:`RequestError`.

    ``experiment.code`` starts from ``folder``.
    """
    experiment = with_cluster_sinks(experiment, session.cluster.settings)
    prepared = PreparedCommand(experiment, read_code(folder / experiment.code), run_folder.new_run_id(experiment.name))
    preview(session, prepared)
    return prepared


def prepare_again(session: Session, run: Path) -> PreparedCommand:
    """Returns the program of a run, with the code that the run started with."""
    experiment = load_command(run / run_folder.EXPERIMENT)
    prepared = PreparedCommand(experiment, code_of_run(run), run_folder.new_run_id(experiment.name))
    preview(session, prepared)
    return prepared


def preview(session: Session, prepared: PreparedCommand) -> RunBundle:
    """Returns the run as it would start, from what is known without contacting a host."""
    port = prepared.experiment.launch.master_port or default_port(prepared.run_id)
    return _bundle(session, prepared, port)


def launch(
    session: Session,
    prepared: PreparedCommand,
    *,
    check: bool = True,
    share: bool = False,
    queue: bool = False,
    approve: Approve | None = None,
) -> RunBundle:
    """Brings the nodes up, sends the code and the run's files to all of them, and starts the run on the head.

    ``check``, ``share``, ``queue`` and ``approve`` are those of :func:`start_on_nodes`.
    """
    session.keeps_shells = True
    return start_on_nodes(
        session,
        prepared.experiment,
        lambda: _free_port(session, prepared.experiment.launch.master_port),
        lambda image_id, port: _bundle(session, prepared, port, image_id=image_id),
        lambda bundle: _put_files(session, prepared.code, bundle),
        check=check,
        share=share,
        queue=queue,
        approve=approve,
    )


def _put_files(session: Session, code: Code, bundle: RunBundle) -> None:
    """Writes the run's first files and its code on every node; sends only the files of code that the node lacks."""
    by_content = {it.sha256: code.folder / name for name, it in code.files.items()}
    store = f"{run_folder.WORKSPACE}/runs/{run_folder.CODE_STORE}"
    files_on = first_files(session, bundle)
    members = {name: archive_member(name, content) for name, content in bundle.files.items()}
    index = members[run_folder.CODE_INDEX]

    def send(node: str, host: Host) -> None:
        folder = host_folder(session, node, bundle)
        files = [members[name] for name in files_on(node) if name != run_folder.CODE_INDEX]
        packed = b"".join((*files, index, ARCHIVE_END))  # the index last: the node takes nothing less for all
        # The node writes them itself: on many hosts every process of a shell counts.
        place = session.inside(node, *NODE, "place-code", "--files", bundle.path, interactive=True)
        done = host.pipe((packed,), place, timeout=_CODE_TIMEOUT_S)
        done = replace(done, command=f"write into {folder}")
        if missing := session.answer(node, PlacedCode, "place-code", done).missing:
            archive = archive_of({sha256: by_content[sha256] for sha256 in missing})
            receive = session.inside(node, *NODE, "receive-files", store, interactive=True)
            host.pipe(archive, receive, timeout=_CODE_TIMEOUT_S).checked(node)
            argv = ("place-code", bundle.path)
            placed = session.ask(node, PlacedCode, *argv, stdin=code.index.encode(), timeout=_CODE_TIMEOUT_S)
            if placed.missing:
                got, todo = f"{len(placed.missing)} files", "launch again: the folder has changed since it was read"
                raise RequestError(Problem(str(code.folder), f"did not arrive whole on {node}", got, todo))

    session.each(send)


def _free_port(session: Session, wanted: int | None) -> int:
    argv: Sequence[str] = () if wanted is None else ("--port", str(wanted))
    answer = session.ask(session.head, PreflightAnswer, "preflight", "--head", *argv, timeout=_TIMEOUT_S)
    refuse_other_contract(session, answer)
    found = answer.rendezvous
    assert found is not None
    if (problem := found.problem) is not None:
        where = f"{session.head}: {problem.where}"
        raise ClusterError(Problem(where, problem.what, problem.got, problem.todo))
    assert found.port is not None
    return found.port


def _bundle(session: Session, prepared: PreparedCommand, port: int, **image: object) -> RunBundle:
    cluster = session.cluster
    manifest = {
        **provenance(cluster.project_folder),
        "cluster": cluster.name,
        "hostfile": cluster.hostfile.render(),
        "image": cluster.settings.image,
        **image,
        "code": dict(prepared.code.origin),
    }
    address = cluster.address_of(session.head)
    about = (prepared.experiment, cluster.slots, prepared.run_id, address, port, manifest)
    run = CommandRun(*about, spares=cluster.spares)
    bundle = make_command_bundle(run).with_file(run_folder.CODE_INDEX, prepared.code.index.encode())
    if prepared.code.diff is not None:
        return bundle.with_file(run_folder.CODE_DIFF, prepared.code.diff)
    return bundle
