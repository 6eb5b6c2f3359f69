"""Submits experiments as a job: the plan, the site, the script, the runs' folders, ``sbatch``."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from tridock.contracts import run_folder
from tridock.contracts.records import read_object
from tridock.errors import Problem, RequestError
from tridock.experiment import dump_experiment, is_command, load_command
from tridock.experiment.command import CommandExperiment
from tridock.gpus import find_gpu
from tridock.launchers.slurm.request import Request, make_request
from tridock.launchers.slurm.script import PROGRAM, Script, program_argv, render
from tridock.ops.runs.code import Code, code_of_run
from tridock.ops.runs.prepare import Prepared, prepare
from tridock.ops.slurm import scheduler
from tridock.ops.slurm.program import PreparedProgram, prepare_program, request_for
from tridock.ops.slurm.site import Group, gpu_of, idle_nodes, parse_sinfo, site_problems
from tridock.plan import Assumptions
from tridock.strict_yaml import read_text
from tridock.yaml_text import parse_value

AnyRun = Prepared | PreparedProgram
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
    """Submits the job, and reports how many suitable nodes are idle.

    Raises :class:`RequestError` with every objection of the plan, the site or Slurm.
    """
    groups = _sinfo()
    script = _checked(options, groups)
    if (idle := idle_nodes(groups, script.request)) is not None:
        say(idle)
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


def again(run: Path) -> SubmitOptions:
    """Returns a run's job again, with the run's original code. Raises :class:`RequestError` if its folder does not
    describe it.
    """
    request = read_object(run / run_folder.JOB).get("request")
    if not isinstance(request, dict):
        todo = "submit the program again: tridock run --slurm"
        raise RequestError(Problem(str(run / run_folder.JOB), "does not contain the job's request", "", todo))
    # The program determines the launcher of the ranks.
    changes = {name: value for name, value in request.items() if name != "launcher"}
    program = (load_command(run / run_folder.EXPERIMENT), code_of_run(run))
    return SubmitOptions((), changes=changes, workspace=run.absolute().parent.parent, program=program)


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
    if "gpus_per_node" not in changes and (gpus := _allocated_gpus(scheduler.job_fields(job))):
        changes["gpus_per_node"] = gpus
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
    """Records the job that the run belongs to."""
    path = folder / run_folder.JOB
    known = json.loads(path.read_text()) if path.exists() else {}
    fields: dict[str, object] = {"job_id": job_id, "noted": datetime.now(UTC).isoformat(timespec="seconds")}
    if request is not None:
        fields["request"] = request.model_dump(mode="json", exclude_defaults=True)
    run_folder.write_atomic(path, (json.dumps({**known, **fields}, indent=2) + "\n").encode())


def _allocated_gpus(fields: Mapping[str, str]) -> int | None:
    """Returns a node's GPUs from ``scontrol show job``: ``TresPerNode=gres:gpu:v100:4``."""
    found = re.search(r"gpu(?:[:/][^:,=]+)??[:=](\d+)", fields.get("TresPerNode", ""))
    return int(found[1]) if found else None


def _sinfo() -> list[Group]:
    lines = scheduler.sinfo()
    return [] if lines is None else parse_sinfo(lines)


def _checked(options: SubmitOptions, groups: Sequence[Group]) -> Script[AnyRun]:
    """Returns the script, checked against the site; reports all problems at once, Slurm's own included."""
    request = _request(options)
    problems = list(site_problems(groups, request, options.source))
    try:
        script = _script(options, request, groups)
    except RequestError as error:
        raise RequestError([*error.problems, *problems]) from None
    try:
        _check_data(script)
    except RequestError as error:
        problems += error.problems
    folder = Path(script.workspace) / "runs"
    folder.mkdir(exist_ok=True)
    trial = folder / f".{script.first.run_id}.sh"
    trial.write_text(render(script))
    try:
        refusal = scheduler.refusal(trial)
    finally:
        trial.unlink()
    if refusal is not None:
        todo = "correct the request; sinfo shows what the cluster has"
        problems.append(Problem("sbatch", "Slurm refuses the job", refusal, todo))
    if problems:
        raise RequestError(problems)
    return script


def _request(options: SubmitOptions) -> Request:
    text = "" if options.profile is None else read_text(options.profile, "a site's profile")
    return make_request(text, options.source, options.changes)


def _script(
    options: SubmitOptions, request: Request, groups: Sequence[Group], *, in_allocation: bool = False
) -> Script[AnyRun]:
    """Plans every run and returns the script. Raises :class:`RequestError` with all problems."""
    workspace = _workspace(options.workspace)
    if programs := list(_programs(options)):
        return _programs_script(programs, request, workspace, in_allocation=in_allocation)
    gpu = find_gpu(request.gpu, "gpu") if request.gpu is not None else gpu_of(groups, request)
    runs: list[AnyRun] = []
    problems: dict[Problem, None] = {}
    for config, changes in itertools.product(options.configs, _changes(options)):
        try:
            prepared = prepare(config, request.slots, Assumptions(gpu=gpu), changes, force=options.force)
        except RequestError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        run_id = _new_run_id(prepared.experiment.name, runs)
        runs.append(replace(prepared, run_id=run_id))
    if problems:
        raise RequestError(problems)
    return Script(request, runs, str(workspace), in_allocation=in_allocation)


def _programs(options: SubmitOptions) -> Iterator[tuple[CommandExperiment, Path | Code]]:
    """Yields the requested programs of your own, with the code of each or the folder it is relative to."""
    if options.program is not None:
        yield options.program
    own = [config for config in options.configs if is_command(config)]
    if own and len(own) < len(options.configs):
        got, todo = ", ".join(map(str, own)), "submit them in another job"
        raise RequestError(Problem("CONFIG", "mix your own programs with experiments", got, todo))
    for config, changes in itertools.product(own, _changes(options)):
        yield load_command(config, changes), config.parent


def _programs_script(
    programs: Sequence[tuple[CommandExperiment, Path | Code]], request: Request, workspace: Path, *, in_allocation: bool
) -> Script[AnyRun]:
    runs: list[AnyRun] = []
    problems: dict[Problem, None] = {}
    for experiment, source in programs:
        try:
            request = request_for(experiment, request)
            runs.append(prepare_program(experiment, source, request.slots, _new_run_id(experiment.name, runs)))
        except RequestError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise RequestError(problems)
    return Script(request, runs, str(workspace), in_allocation=in_allocation)


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


def _new_run_id(name: str, others: Sequence[AnyRun]) -> str:
    taken = {other.run_id for other in others}
    return next(run_id for run_id in iter(lambda: run_folder.new_run_id(name), None) if run_id not in taken)


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


def _check_data(script: Script[AnyRun]) -> None:
    problems: dict[Problem, None] = {}
    for prepared in (run for run in script.elements if isinstance(run, Prepared)):
        try:
            prepared.with_files_of(Path(script.workspace))
        except RequestError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise RequestError(problems)


def _write(script: Script[AnyRun]) -> tuple[Path, ...]:
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


def _write_run(folder: Path, element: AnyRun, script: Script[AnyRun], text: str) -> None:
    files = {run_folder.JOB_SCRIPT: text}
    if isinstance(element, Prepared):
        resolved = element.experiment.resolved(element.assessment.laid_out.data_parallel_size)
        files |= {run_folder.EXPERIMENT: dump_experiment(resolved), run_folder.PLAN: element.assessment.to_json()}
    if script.is_array:
        files[PROGRAM] = "".join(f"{word}\n" for word in program_argv(script, element))
    for name, content in files.items():
        run_folder.write_atomic(folder / name, content.encode())
    if isinstance(element, PreparedProgram):
        element.write(folder, script.request.slots)
