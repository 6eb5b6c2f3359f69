"""Submits experiments as a job: the plan, the site, the script, the runs' folders, ``sbatch``."""

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from tridock.contracts import run_folder
from tridock.contracts.records import read_object
from tridock.contracts.run_state import exit_code_of
from tridock.errors import Problem, RequestError
from tridock.experiment import CommandExperiment, is_command, load_command
from tridock.gpus import Gpu, find_gpu
from tridock.launchers.programs import program_of
from tridock.launchers.run import make_bundle
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.slurm.profile import make_request
from tridock.launchers.slurm.ranks import MPIRUN, OWN_PROGRAM
from tridock.launchers.slurm.request import Request
from tridock.launchers.slurm.script import PROGRAM, Script, program_argv, render
from tridock.ops.runs.code import Code, code_of_run, place_code
from tridock.ops.runs.prepare import prepare
from tridock.ops.runs.prepared import Prepared, Slots, prepare_command
from tridock.ops.runs.recorded_run import Confirm, confirm_run
from tridock.ops.runs.resume import continuation
from tridock.ops.slurm import scheduler
from tridock.ops.slurm.site import Group, gpu_of, limit_problems, parse_sinfo
from tridock.plan import Assumptions
from tridock.strict_yaml import read_text
from tridock.yaml_text import parse_value

AS_SUBMITTED: Final = Slurm(("srun",))
"""Makes a run's first files before Slurm has named its nodes."""
_FIRST: Final = (
    *(run_folder.EXPERIMENT, run_folder.PLAN, run_folder.MANIFEST, run_folder.CODE_INDEX, run_folder.CODE_DIFF),
)
_PLAIN_PATH = re.compile(r"/[\w./@+=,-]*")


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What to submit: experiments or a program, their overrides and sweeps, and the request's own fields."""

    configs: Sequence[Path]
    overrides: Sequence[str] = ()
    sweeps: Sequence[str] = ()
    profile: Path | None = None
    changes: Mapping[str, object] = field(default_factory=dict)
    """Fields of the request by dotted names."""
    workspace: Path = Path()
    force: bool = False
    program: tuple[CommandExperiment, Path | Code] | None = None
    """Your own program, instead of ``configs``, and its code or the folder that the code is relative to."""

    @property
    def source(self) -> str:
        """The prefix of messages about the request."""
        return "slurm" if self.profile is None else str(self.profile)


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted job: its id, and the folder of each of its runs."""

    job_id: str
    folders: tuple[Path, ...]


def render_script(options: SubmitOptions) -> str:
    """Returns the script, for a person to read or pass to sbatch. Contacts neither Slurm nor nodes."""
    script = _script(options, _request(options), [])
    if len(script.elements) > 1 or options.program is not None:
        return render(script)
    source = ["--config", str(options.configs[0])]
    source += [word for change in _changes(options)[0] for word in ("--set", change)]
    return render(replace(script, source=source))


def submit(options: SubmitOptions, say: Callable[[str], None]) -> Submitted:
    """Submits the job, and reports when and where Slurm expects it to start.

    Raises :class:`RequestError` with every objection of the plan, the partition or Slurm.
    """
    request, groups = _request(options), parse_sinfo(scheduler.sinfo())
    script = _script(options, request, groups)
    if estimate := _checked(script, limit_problems(groups, request, options.source)):
        say(estimate)
    if request.gpu is None and request.gpu_request != "none" and gpu_of(groups, request) is None:
        say("memory was not compared with the plan: Slurm names no GPU that Tridock knows; set gpu: in the profile")
    for note in dict.fromkeys(run.code.note for run in script.elements if run.code is not None):
        if note:
            say(note)
    folders = _write(script)
    try:
        job_id = scheduler.submit(folders[0] / run_folder.JOB_SCRIPT)
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder)
        raise
    for number, folder in enumerate(folders):
        note_job(folder, f"{job_id}_{number}" if script.is_array else job_id, script.request)
    return Submitted(job_id, folders)


def again(run: Path, confirm: Confirm) -> SubmitOptions:
    """Returns a run's job again, with the run's original code, once ``confirm`` allows what its folder would execute.

    Raises :class:`RequestError` if its folder does not describe it.
    """
    # The program determines the launcher of the ranks.
    changes = {name: value for name, value in _recorded_request(run).items() if name != "launcher"}
    program = (load_command(run / run_folder.EXPERIMENT), code_of_run(run))
    confirm_run(run, confirm, changes, [f"send {program[1].number} of {program[1].folder}"])
    return SubmitOptions((), changes=changes, workspace=run.absolute().parent.parent, program=program)


def resumed(run: Path, overrides: Sequence[str], changes: Mapping[str, object], confirm: Confirm) -> SubmitOptions:
    """Returns the job that continues a run of an engine as a new run, with ``changes`` of the request.

    Raises :class:`RequestError` as :func:`continuation` does.
    """
    request = {**_recorded_request(run), **changes}
    found = continuation(run, overrides, confirm, request)
    print(found, file=sys.stderr)
    return SubmitOptions((found.config,), found.overrides, changes=request, workspace=run.absolute().parent.parent)


def submit_again(run: Path, confirm: Confirm) -> Submitted:
    """Submits the job of a run of your own program again, which continues it in its folder, with its resume command.

    Raises :class:`RequestError` if the program has come to its end.
    """
    if exit_code_of(run) == 0:
        todo = "start it anew: tridock run --slurm"
        raise RequestError(Problem(str(run), "has come to its end", "exit code 0", todo))
    script = run / run_folder.JOB_SCRIPT
    confirm_run(run, confirm, _recorded_request(run), [f"submit {script}"])
    _, is_element, number = str(read_object(run / run_folder.JOB).get("job_id")).partition("_")
    job_id = scheduler.submit(script, *([f"--array={number}"] if is_element else ())) + is_element + number
    note_job(run, job_id)
    return Submitted(job_id, (run,))


def _recorded_request(run: Path) -> dict[str, object]:
    request = read_object(run / run_folder.JOB).get("request")
    if not isinstance(request, dict):
        what = "does not contain the job's request"
        todo = "submit it anew: tridock slurm submit, or tridock run --slurm"
        raise RequestError(Problem(str(run / run_folder.JOB), what, "", todo))
    return request


def run_in_allocation(options: SubmitOptions) -> NoReturn:
    """Starts the run at once in the current allocation (``salloc``): replaces this process with its script."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        todo = "begin with salloc --nodes=… --gres=gpu:…, or use tridock slurm submit"
        raise RequestError(Problem("tridock slurm run", "is for a shell inside an allocation", "no SLURM_JOB_ID", todo))
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    if options.changes.get("nodes", nodes) != nodes:
        todo = "leave --nodes out"
        raise RequestError(Problem("--nodes", f"is not the allocation's, {nodes}", str(options.changes["nodes"]), todo))
    changes = {**options.changes, "nodes": nodes}
    if "SLURM_CPUS_PER_TASK" not in os.environ:  # salloc was called without it: srun has none to distribute
        changes["cpus_per_node"] = None
    allocated = scheduler.job_fields(job).get("TresPerNode", "")  # gres:gpu:v100:4
    if "gpus_per_node" not in changes and (gpus := re.search(r"gpu(?:[:/][^:,=]+)??[:=](\d+)", allocated)):
        changes["gpus_per_node"] = int(gpus[1])
    script = _script(options, _request(replace(options, changes=changes)), [], in_allocation=True)
    if script.is_array:
        todo = "give one CONFIG, or use tridock slurm submit"
        raise RequestError(Problem("tridock slurm run", "is for a single run", f"{len(script.elements)} runs", todo))
    _check_data(script)
    (folder,) = _write(script)
    note_job(folder, job, script.request)
    print(f"run {folder.name}; folder {folder}")
    os.execvp("bash", ["bash", str(folder / run_folder.JOB_SCRIPT)])  # noqa: S606 - a script of our own


def note_job(folder: Path, job_id: str, request: Request | None = None) -> None:
    path = folder / run_folder.JOB
    known = json.loads(path.read_text()) if path.exists() else {}
    fields: dict[str, object] = {"job_id": job_id, "noted": datetime.now(UTC).isoformat(timespec="seconds")}
    if request is not None:
        fields["request"] = request.model_dump(mode="json", exclude_defaults=True)
    run_folder.write_atomic(path, (json.dumps({**known, **fields}, indent=2) + "\n").encode())


def _checked(script: Script[Prepared], limits: Iterable[Problem]) -> str:
    """Returns Slurm's estimate of the job's start; reports all problems of limits, data and Slurm's own at once."""
    problems, estimate = list(limits), ""
    folder = Path(script.workspace) / "runs"
    folder.mkdir(exist_ok=True)
    trial = folder / f".{script.first.run_id}.sh"
    trial.write_text(render(script))
    try:
        _check_data(script)
    except RequestError as error:
        problems += error.problems
    try:
        estimate = scheduler.estimate(trial)
    except RequestError as error:
        problems += error.problems
    finally:
        trial.unlink()
    RequestError.raise_for(problems)
    return estimate


def _request(options: SubmitOptions) -> Request:
    text = "" if options.profile is None else read_text(options.profile, "a site's profile")
    return make_request(text, options.source, options.changes)


def _script(
    options: SubmitOptions, request: Request, groups: Sequence[Group], *, in_allocation: bool = False
) -> Script[Prepared]:
    """Prepares every run and returns the script. Raises :class:`RequestError` with all problems."""
    workspace = _workspace(options.workspace)
    own = [config for config in options.configs if is_command(config)]
    if own and len(own) < len(options.configs):
        got, todo = ", ".join(map(str, own)), "submit them in another job"
        raise RequestError(Problem("CONFIG", "mix your own programs with experiments", got, todo))
    gpu = find_gpu(request.gpu, "gpu") if request.gpu is not None else gpu_of(groups, request)
    asked = [
        partial(prepare_run, config, changes, request.slots, gpu, force=options.force)
        for config, changes in itertools.product(options.configs, _changes(options))
    ]
    if options.program is not None:
        asked = [partial(prepare_command, *options.program, request.slots, AS_SUBMITTED)]
    runs: list[Prepared] = []
    problems: dict[Problem, None] = {}
    for ask in asked:
        try:
            prepared = ask()
            request = _request_for(prepared, request)
        except RequestError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        run_id, taken = run_folder.new_run_id(prepared.experiment.name), {run.run_id for run in runs}
        while run_id in taken:
            run_id = run_folder.new_run_id(prepared.experiment.name)
        runs.append(replace(prepared, run_id=run_id))
    RequestError.raise_for(problems)
    return Script(request, runs, str(workspace), in_allocation=in_allocation)


def prepare_run(
    config: Path, overrides: Sequence[str], slots: Slots, gpu: Gpu | None, *, force: bool, run_id: str | None = None
) -> Prepared:
    """Returns the experiment with its plan, or your own program with its code. Raises :class:`RequestError`."""
    if is_command(config):
        return prepare_command(load_command(config, overrides), config.parent, slots, AS_SUBMITTED, run_id)
    return prepare(config, slots, Assumptions(gpu), overrides, force=force, run_id=run_id)


def _request_for(prepared: Prepared, request: Request) -> Request:
    """Returns the request with the tasks that your own program needs. Raises :class:`RequestError`."""
    if prepared.assessment is not None:
        return request
    is_mpi = program_of(prepared.command.command, prepared.command.per)[0].name == MPIRUN
    if is_mpi and request.container.kind != "none":
        what, todo = f"starts its ranks with srun, and cannot from within {request.container.kind}", "use torchrun"
        got = prepared.command.command[0]
        raise RequestError(Problem("command", what, got, f"{todo}, or container.kind none"))
    return request.model_copy(update={"launcher": MPIRUN if is_mpi else OWN_PROGRAM})


def _workspace(path: Path) -> Path:
    workspace = path.absolute()
    if not workspace.is_dir():
        todo = "give the folder that holds data/, on a file system that all nodes share"
        raise RequestError(Problem("--workspace", "is not a folder", str(workspace), todo))
    if not _PLAIN_PATH.fullmatch(str(workspace)):
        todo = "use a folder whose path has only letters, digits and . / @ + = , - _"
        what = "has a character that sbatch or a launcher would take for its own"
        raise RequestError(Problem("--workspace", what, str(workspace), todo))
    return workspace


def _changes(options: SubmitOptions) -> list[tuple[str, ...]]:
    """Returns the overrides of every run: all combinations of the sweeps' values."""
    axes = [_axis(sweep) for sweep in options.sweeps]
    return [(*options.overrides, *chosen) for chosen in itertools.product(*axes)]


def _axis(sweep: str) -> list[str]:
    """Expands ``field=1,2,3`` or ``field=[a, b]`` into one override per value."""
    path, equals, text = sweep.partition("=")
    values = parse_value(text if text.startswith("[") else f"[{text}]", f"--sweep {path}") if equals and text else None
    if not path or not isinstance(values, list) or not values:
        todo = "write for example optimizer.lr=1e-3,3e-4"
        raise RequestError(Problem("--sweep", "must be a field's path, =, and values", repr(sweep), todo))
    return [f"{path}={json.dumps(value)}" for value in values]


def _check_data(script: Script[Prepared]) -> None:
    problems: dict[Problem, None] = {}
    for prepared in script.elements:
        try:
            prepared.with_files_of(Path(script.workspace))
        except RequestError as error:
            problems |= dict.fromkeys(error.problems)
    RequestError.raise_for(problems)


def _write(script: Script[Prepared]) -> tuple[Path, ...]:
    """Writes every run's folder with the files that the job needs; writes none if one fails."""
    text = render(script)
    folders: list[Path] = []
    try:
        for element in script.elements:
            folder = Path(script.workspace) / "runs" / element.run_id
            (folder / "logs").mkdir(parents=True)
            folders.append(folder)
            _write_run(folder, element, script, text)
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return tuple(folders)


def _write_run(folder: Path, element: Prepared, script: Script[Prepared], text: str) -> None:
    """Writes what the job itself cannot know; it adds the rest."""
    known = make_bundle(element, AS_SUBMITTED).files
    files = {run_folder.JOB_SCRIPT: text.encode(), **{name: known[name] for name in _FIRST if name in known}}
    if script.is_array:
        files[PROGRAM] = "".join(f"{word}\n" for word in program_argv(script, element)).encode()
    for name, content in files.items():
        run_folder.write_atomic(folder / name, content)
    if element.code is not None:
        place_code(element.code, folder)
