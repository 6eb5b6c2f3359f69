"""A run before it starts: a program on slots, under a run id; an engine's has a plan (:mod:`.prepare`).

Imports no planner: `tridock run` needs none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from tridock.contracts import run_folder
from tridock.contracts.node_answers import PreflightAnswer
from tridock.contracts.supervision import contract
from tridock.errors import ClusterError, Problem
from tridock.experiment import CommandExperiment
from tridock.launchers.run import Launcher, Run, make_bundle
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs.code import Code, read_code

Slots = Mapping[str, Sequence[int]]
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Preflight:
    """The nodes' answers: the port to use on the head, the image's manifest, the data's fingerprints."""

    port: int
    image_manifest: object
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Run):
    """A run that may start; its manifest lists only its inputs."""

    code: Code | None = None
    """The user's code, in a copy of which the program runs."""

    def check_nodes(self, client: NodeClient) -> Preflight:
        """Asks the nodes whether the run can start there. Raises :class:`ClusterError` for a port in use."""
        wanted = self.experiment.launch.master_port
        argv: Sequence[str] = () if wanted is None else ("--port", str(wanted))
        answer = client.ask(client.head, PreflightAnswer, "preflight", "--head", *argv, timeout=_TIMEOUT_S)
        refuse_other_contract(client, answer)
        return Preflight(port_of(client.head, answer, None), answer.image_manifest)

    def with_files_of(self, _workspace: Path) -> Self:
        """Returns it with this machine's files in the manifest. A program's are unknown."""
        return self


def refuse_other_contract(client: NodeClient, answer: PreflightAnswer) -> None:
    """Raises :class:`ClusterError` if the head's image cannot read the run files that this code writes."""
    if answer.contract != contract():
        raise client.other_version(client.head, f"contract {answer.contract or 'unknown'}, {contract()} here")


def port_of(head: str, answer: PreflightAnswer, field: str | None) -> int:
    """Returns the rendezvous port that the head has found. Raises :class:`ClusterError` if it is in use.

    ``field``: the experiment's field that names it, if one does.
    """
    found = answer.rendezvous
    assert found is not None
    if (problem := found.problem) is not None:
        if field is None:
            raise ClusterError(replace(problem, where=f"{head}: {problem.where}"))
        what, todo = f"{problem.where} {problem.what} on {head}", "change it or leave it out"
        raise ClusterError(Problem(field, what, problem.got, todo))
    assert found.port is not None
    return found.port


def prepare_command(
    experiment: CommandExperiment, source: Path | Code, slots: Slots, launcher: Launcher, run_id: str | None = None
) -> Prepared:
    """Reads the code, relative to ``source`` if it is a folder, and checks the command line; contacts no host.

    Raises :class:`RequestError`.
    """
    code = source if isinstance(source, Code) else read_code(source / experiment.code)
    manifest = {"code": dict(code.origin)}
    run_id = run_id or run_folder.new_run_id(experiment.name)
    prepared = Prepared(experiment, slots, run_id, manifest=manifest, files=code.records, code=code)
    make_bundle(prepared, launcher)
    return prepared
