"""Runs a benchmark cell by cell; the engine and the bare loop take turns. A failed cell is recorded."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tridock.bench.cells import Bench, Cell, Measured, cells_of
from tridock.contracts import environment
from tridock.contracts.events import Event, event_lines, events_of
from tridock.contracts.records import read_metrics, read_plan
from tridock.engines import program_of
from tridock.engines.fields import as_overrides
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, load_experiment
from tridock.gpus import Gpu
from tridock.plan import Assumptions, assess
from tridock.report.summary import summarize
from tridock.strict_yaml import read_text
from tridock.triage.first_failure import first_failure

Say = Callable[[str], None]
_STOP_S = 60.0
_TURN = 2
"""Steps until the engine and the bare loop change places: few, because a machine's speed changes within seconds."""


def run_bench(bench: Bench, folder: Path, gpu: Gpu | None, gpus: int | None, say: Say) -> Iterator[Measured]:
    """Yields each cell as it is measured; ``folder`` contains the benchmark's file, ``gpus`` is the number of ranks
    that can have a GPU of this machine (None: they train on the CPU).

    Raises :class:`RequestError` if the experiment does not exist.
    """
    config = folder / bench.experiment
    config = config if config.is_file() else Path(bench.experiment)
    read_text(config, "an experiment")
    cells = list(cells_of(bench))
    for number, cell in enumerate(cells, start=1):
        say(f"{number} of {len(cells)}: {cell.name}")
        measured = measure(bench, cell, config, gpu, gpus)
        if measured.reason:
            say(f"  {measured.state}: {measured.reason}")
        yield measured


def measure(bench: Bench, cell: Cell, config: Path, gpu: Gpu | None, gpus: int | None) -> Measured:
    """Measures one cell: plans it, then runs it the requested number of times."""
    length = {
        "train.train_iters": bench.warmup + bench.iterations,
        "train.log_interval": 1,
        "train.eval_interval": 0,
        "train.save": False,
        "train.tensorboard": False,
        # So few steps do not fit the experiment's schedule.
        "optimizer.lr_warmup_iters": 0,
        "optimizer.lr_decay_iters": None,
    }
    overrides = as_overrides({**length, **cell.fields})
    try:
        experiment = load_experiment(config, overrides)
        if gpus is not None and cell.world > gpus and experiment.env.get("DS_ACCELERATOR") != "cpu":
            what, todo = "each rank needs its own GPU", f"this machine has {gpus}"
            raise RequestError(Problem("world", what, str(cell.world), todo))
        assessment = assess(experiment, {"localhost": range(cell.world)}, str(config), Assumptions(gpu=gpu))
        plan = assessment.checked()
    except RequestError as error:
        return Measured(cell, "refused", str(error.problems[0]))
    measured = Measured(
        cell,
        "ok",
        tokens_per_step=plan.tokens_per_step,
        unit=experiment.model.unit,
        predicted_bytes=None if assessment.worst is None else assessment.worst.total_bytes,
    )
    for _ in range(bench.repeats):
        measured = _run_measured(measured, bench, config, overrides)
        if measured.state != "ok":
            return measured
        if bench.bare and _has_bare(experiment):
            measured = _run_bare(measured, bench, config, overrides)
    return _run_profiled(measured, bench, config, overrides) if bench.profiled else measured


def _has_bare(experiment: Experiment) -> bool:
    """The bare loop supports one process a device, DDP, and the GPT."""
    parallel = experiment.parallel
    plain = parallel.strategy == "ddp" and not parallel.splits_model and experiment.precision != "fp16"
    return program_of(experiment).has_plain_loop and plain and not experiment.model.is_vision


def _run_once(world: int, timeout: int, config: Path, overrides: Sequence[str], turns: str = "") -> Path | str:
    """Returns the run's folder, or why it failed. ``turns``: as ``tridock.train.bench.baseline_loop`` parses them."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder, "run-id")
        argv = [sys.executable, "-m", "tridock.cli", "train", str(config), "--run-id-file", str(noted)]
        argv += ["--nproc", str(world), *(argument for override in overrides for argument in ("--set", override))]
        try:
            failure = _execute(argv, timeout, {environment.TURNS: turns} if turns else {})
        except subprocess.TimeoutExpired:  # its ranks record that they were stopped, but not why
            return f"no end after {timeout} s"
        run = Path("runs", noted.read_text().strip()) if noted.exists() else None
        if failure is None:
            assert run is not None
            return run
        return (run and _failure_of(run)) or failure


def _failure_of(run: Path) -> str | None:
    nodes = {rank["rank"]: rank["node"] for rank in read_plan(run).get("ranks", ())}
    found = first_failure({"": event_lines(run)}, nodes)
    return f"{run.name}: {found}; see {run}/logs" if found else None


def _run_measured(measured: Measured, bench: Bench, config: Path, overrides: Sequence[str]) -> Measured:
    run = _run_once(measured.cell.world, bench.timeout, config, overrides)
    if isinstance(run, str):
        return replace(measured, state="failed", reason=run)
    steps = [entry["step_time_s"] for entry in read_metrics(run)[0] if entry["iteration"] > bench.warmup]
    summary = summarize(run)
    end = events_of(run, Event.RUN_FINISHED)[-1]
    step = statistics.median(steps)
    # The summary's figures include all steps: these only the measured ones.
    share = (summary.tokens_per_second or 0.0) / (measured.tokens_per_step / step)
    tflops = summary.model_tflops_per_rank
    return replace(
        measured,
        step_s=(*measured.step_s, step),
        model_tflops_per_rank=None if tflops is None or not share else tflops / share,
        mfu=None if summary.mfu is None or not share else summary.mfu / share,
        peak_bytes=max(measured.peak_bytes or 0, summary.peak_memory_bytes or 0) or None,
        device=end.get("device", ""),
        runs=(*measured.runs, run.name),
    )


def _run_profiled(measured: Measured, bench: Bench, config: Path, overrides: Sequence[str]) -> Measured:
    """Runs steps under the profiler, which slows them down: their times are not used. One rank does not communicate."""
    if measured.cell.world == 1:
        return replace(measured, communication=0.0)
    length = {"train.train_iters": bench.warmup + bench.profiled, "train.profile_iters": bench.profiled}
    run = _run_once(measured.cell.world, bench.timeout, config, [*overrides, *as_overrides(length)])
    if isinstance(run, str):
        return replace(measured, no_communication=run)
    events = events_of(run, Event.COMMUNICATION_MEASURED)
    if not events:
        return replace(measured, no_communication=f"{run} has not recorded it")
    return replace(measured, communication=events[-1]["exposed"], profiled_run=run.name)


def _run_bare(measured: Measured, bench: Bench, config: Path, overrides: Sequence[str]) -> Measured:
    """Alternates a run with a bare loop without Tridock, apart from the other runs: it holds two models."""
    turns = f"{bench.warmup},{min(_TURN, bench.iterations)}"
    # Turns have their own timers: the line of every step, which serves the other runs' figures, is not needed.
    own = load_experiment(config, as_overrides(measured.cell.fields)).train.log_interval
    overrides = [*overrides, *as_overrides({"train.log_interval": own})]
    run = _run_once(measured.cell.world, bench.timeout, config, overrides, turns)
    if isinstance(run, str):
        return replace(measured, no_bare=run)
    events = events_of(run, Event.BESIDE_BARE)
    if not events:
        return replace(measured, no_bare=f"{run} has not recorded it")
    # The first turn is the warm-up.
    ratios = [engine / bare for engine, bare in zip(events[-1]["engine_s"], events[-1]["bare_s"], strict=True)][1:]
    return replace(measured, over_bare=(*measured.over_bare, *ratios))


def _execute(argv: Sequence[str], timeout: int, env: Mapping[str, str]) -> str | None:
    """Returns the last line of output if it fails, else None. Raises ``TimeoutExpired`` once it has stopped."""
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **env}
    # A separate session: this process handles Ctrl-C, so that the run has time to stop on all ranks.
    with subprocess.Popen(
        argv, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            _stop(process)
            raise
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


def _stop(process: subprocess.Popen[str]) -> None:
    """Sends SIGINT, as Ctrl-C does: `tridock train` stops its ranks and supervisor, which SIGKILL would leave."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignores an impatient second Ctrl-C
    try:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
    finally:
        signal.signal(signal.SIGINT, previous)
