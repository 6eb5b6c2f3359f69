"""Your own program in a Slurm job: its code and files are in the run's folder, which nodes share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import PlacedCode
from tridock.contracts.records import read_object
from tridock.errors import ClusterError, Problem, RequestError, count
from tridock.experiment import dump_experiment, load_command
from tridock.launchers.bundle import default_port
from tridock.launchers.command import CommandRun, JobStep, make_command_bundle
from tridock.launchers.programs import program_of
from tridock.launchers.slurm.ranks import MPIRUN, OWN_PROGRAM
from tridock.ops.runs.code import Code, archive_of, read_code
from tridock.ops.runs.this_machine import CODE_FOLDER, node_argv, node_environment

if TYPE_CHECKING:
    from tridock.experiment.command import CommandExperiment
    from tridock.launchers.bundle import RunBundle
    from tridock.launchers.slurm.request import Request

_PACKAGE: Final = "tridock"


@dataclass(frozen=True, slots=True)
class PreparedProgram:
    """A program with its code, under this run id."""

    experiment: CommandExperiment
    code: Code
    run_id: str
    assessment: None = None
    """A program has no plan."""

    def write(self, folder: Path, slots: Mapping[str, Sequence[int]]) -> None:
        """Writes the run's first files: the code, and facts that the job itself cannot know."""
        manifest = {"code": dict(self.code.origin)}
        files = _bundle(self.experiment, folder, slots, manifest, _dry_step(folder)).files
        texts = {
            run_folder.EXPERIMENT: dump_experiment(self.experiment).encode(),
            run_folder.PLAN: files[run_folder.PLAN],
            run_folder.MANIFEST: json.dumps(manifest, indent=2).encode(),
            run_folder.CODE_INDEX: self.code.index.encode(),
        }
        if self.code.diff is not None:
            texts[run_folder.CODE_DIFF] = self.code.diff
        for name, content in texts.items():
            run_folder.write_atomic(folder / name, content)
        place_code(self.code, folder)


def prepare_program(
    experiment: CommandExperiment, source: Path | Code, slots: Mapping[str, Sequence[int]], run_id: str
) -> PreparedProgram:
    """Checks the command line and reads the code, relative to ``source`` if it is a folder. Raises
    :class:`RequestError`.
    """
    code = source if isinstance(source, Code) else read_code(source / experiment.code)
    prepared = PreparedProgram(experiment, code, run_id)
    path = Path(run_folder.WORKSPACE) / "runs" / run_id
    _bundle(experiment, path, slots, {}, _dry_step(path))
    return prepared


def request_for(program: CommandExperiment, request: Request) -> Request:
    """Returns the request with the tasks that the program needs. Raises :class:`RequestError` if they do not fit."""
    is_mpi = program_of(program.command)[0].name == MPIRUN
    if is_mpi and request.container.kind != "none":
        what, todo = f"starts its ranks with srun, and cannot from within {request.container.kind}", "use torchrun"
        raise RequestError(Problem("command", what, program.command[0], f"{todo}, or container.kind none"))
    return request.model_copy(update={"launcher": MPIRUN if is_mpi else OWN_PROGRAM})


def place_code(code: Code, folder: Path) -> None:
    """Writes the code to a run's folder on this machine."""
    if _placed(folder, code.index).missing:
        by_content = {it.sha256: code.folder / name for name, it in code.files.items()}
        missing = _placed(folder, code.index).missing
        archive = b"".join(archive_of({sha256: by_content[sha256] for sha256 in missing}))
        _node(("receive-files", str(folder.parent / run_folder.CODE_STORE)), archive)
        if missing := _placed(folder, code.index).missing:
            todo = "undo what has changed there since it was read, then submit again"
            raise RequestError(Problem(str(code.folder), "did not arrive whole", count(len(missing), "file"), todo))


def _placed(folder: Path, index: str) -> PlacedCode:
    return decode(PlacedCode, _node(("place-code", str(folder)), index.encode()))


def _node(arguments: Sequence[str], stdin: bytes) -> bytes:
    done = subprocess.run(
        [*node_argv(), *arguments], input=stdin, capture_output=True, env=node_environment(1), check=False
    )
    if done.returncode:
        stderr = done.stderr.decode(errors="replace").strip()
        raise ClusterError(Problem(arguments[1], "cannot receive the code", stderr, "check its disk space"))
    return done.stdout


def write_job_files(
    folder: Path,
    config: Path,
    overrides: Sequence[str],
    argv: Sequence[str],
    slots: Mapping[str, Sequence[int]],
    env: Mapping[str, str],
    manifest: Mapping[str, object],
    *,
    on_head: bool,
    in_container: bool,
) -> CommandExperiment:
    """Writes the missing files of the run's folder, for the job's nodes.

    ``config`` is the folder's own, or if Tridock did not submit the script, the file that it names.
    """
    experiment = load_command(config, overrides)
    if not (folder / run_folder.CODE_INDEX).exists():
        code = read_code(config.parent / experiment.code)
        PreparedProgram(experiment, code, folder.name).write(folder, slots)
    code_origin = read_object(folder / run_folder.MANIFEST).get("code")
    step = _step(folder, argv, env, on_head=on_head, in_container=in_container)
    bundle = _bundle(experiment, folder, slots, {**manifest, "code": code_origin}, step)
    for name, content in bundle.files.items():
        if name not in (run_folder.EXPERIMENT, run_folder.HOSTFILE):
            run_folder.write_atomic(folder / name, content)
    return experiment


def _step(folder: Path, argv: Sequence[str], env: Mapping[str, str], *, on_head: bool, in_container: bool) -> JobStep:
    prepared_at = (folder / run_folder.EXPERIMENT).stat().st_mtime
    if in_container:
        return JobStep(argv, run_folder.PYTHON, run_folder.CODE, env, on_head, prepared_at)
    library = folder / run_folder.LIBRARY
    library.mkdir(exist_ok=True)
    # Nothing else of Tridock's environment: the program may use another Python and other versions.
    if not (library / _PACKAGE).is_symlink():
        (library / _PACKAGE).symlink_to(CODE_FOLDER / _PACKAGE)
    # The job's own values: those of the supervisor begin with Tridock's paths.
    own = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
    return JobStep(argv, sys.executable, str(library), {**own, **env}, on_head, prepared_at)


def _dry_step(folder: Path) -> JobStep:
    return JobStep((str(folder),), sys.executable, str(folder / run_folder.LIBRARY))


def _bundle(
    experiment: CommandExperiment,
    folder: Path,
    slots: Mapping[str, Sequence[int]],
    manifest: Mapping[str, object],
    step: JobStep,
) -> RunBundle:
    port = int(os.environ.get("MASTER_PORT", default_port(folder.name)))
    address, workspace = next(iter(slots)), str(folder.parent.parent)
    run = CommandRun(experiment, slots, folder.name, address, port, manifest, workspace=workspace, job=step)
    return make_command_bundle(run)
