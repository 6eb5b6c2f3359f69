"""Reads a run's measurements from its folder, to correct a plan."""

import re
import statistics
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.records import check_run, latest, read_lines, read_metrics, read_plan, slots_of
from tridock.errors import Problem, RequestError
from tridock.experiment import is_command, recorded_experiment
from tridock.gpus import Gpu, find_gpu, of_device
from tridock.plan.correction import MeasuredRun

_CPU: Final = "cpu"
_LONGEST_S: Final = 1e6
"""Maximum seconds of a step; a record with more is damaged."""
_MOST_BYTES: Final = 2**50
"""Maximum memory of a GPU; a record with more is damaged."""


def read_measured_run(folder: Path) -> MeasuredRun:
    """Reads a run's measurements. Raises :class:`RequestError` for another folder, or without a plan or step time."""
    check_run(folder)
    if is_command(folder / run_folder.EXPERIMENT):
        what, todo = "is a run of a program of its own, which has no plan", "give a run of tridock launch or train"
        raise RequestError(Problem(str(folder), what, "", todo))
    plan = read_plan(folder)
    if not (slots := slots_of(plan)):
        todo = "give a run of tridock launch or train"
        raise RequestError(Problem(str(folder), f"has no {run_folder.PLAN}, or a damaged one", "", todo))
    logged = [time for record in read_metrics(folder)[0] if (time := record.get("step_time_s")) is not None]
    times = [time for time in logged[1:] if 0 < time <= _LONGEST_S]
    if not times:
        what = "has logged too few iterations: the first includes the run's start"
        todo = "train at least 2 * train.log_interval iterations"
        raise RequestError(Problem(str(folder), what, str(len(logged)), todo))
    events = read_lines(folder / run_folder.EVENTS)
    device, peak = latest(events, "device") or "", latest(events, "peak_memory_bytes")
    on_gpu = device not in ("", _CPU) and isinstance(peak, int) and 0 < peak <= _MOST_BYTES
    planned, where = (plan.get("memory") or {}).get("gpu"), f"{folder / run_folder.PLAN}: memory.gpu"
    return MeasuredRun(
        source=str(folder),
        experiment=recorded_experiment(folder),
        slots=slots,
        gpu=None if device == _CPU else find_gpu(planned, where) if planned else _named_gpu(device),
        iterations=len(times),
        step_s=statistics.median(times),
        peak_bytes=peak if on_gpu else None,
    )


def _named_gpu(device: str) -> Gpu | None:
    """Returns the GPU of a driver's name, distinguished by memory if several match: ``NVIDIA A100-SXM4-80GB``."""
    memory = re.search(r"(\d+)GB", device)
    return of_device(device, None if memory is None else int(memory[1]) * 1024)
