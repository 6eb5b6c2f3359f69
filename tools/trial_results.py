"""The results of tools/gpu_trial.py: the figures of a step, their tables, and the files of a trial."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trial_steps import ROWS

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError

BEGIN, END = "<!-- GPU trial: written by tools/gpu_trial.py -->", "<!-- end of GPU trial -->"
RESULTS, REPORT, ARCHIVE = "results.json", "report.md", "steps.tar"
_MOST_BYTES, _TRACE, _LOG = 15 << 20, 8 << 20, 1 << 19
"""Of the archive, of a packed profile, which is left out if it is larger, and of a log, of which the end is kept."""
Outcome = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of a step. None and an empty text stand for what it does not have."""

    step: str
    outcome: Outcome
    reason: str = ""
    """Cause and evidence of a failure, also of one that was wanted; why it was not run; what the doctor found."""
    seconds: float = 0.0
    run: str = ""
    device: str = ""
    first_loss: float | None = None
    last_loss: float | None = None
    step_s: float | None = None
    """The median of all steps but the first."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    pause_s: float | None = None
    """For how long training paused for its first checkpoint, which is written in the background."""
    peak_bytes: int | None = None
    planned_bytes: int | None = None
    """The plan's total without context, NCCL and fragmentation, which torch does not count as allocated."""

    @property
    def plan_error(self) -> float | None:
        return self.planned_bytes / self.peak_bytes - 1 if self.planned_bytes and self.peak_bytes else None


COLUMNS: Final[Mapping[str, Callable[[Measurement], str]]] = {
    "step": lambda one: one.step,
    "result": lambda one: one.outcome,
    "loss": lambda one: _text(one.first_loss, ".4f") and f"{one.first_loss:.4f} to {_text(one.last_loss, '.4f')}",
    "time of a step": lambda one: _text(one.step_s and one.step_s * 1e3, ",.1f", " ms"),
    "tokens/s": lambda one: _text(one.tokens_per_second, ",.0f"),
    "MFU": lambda one: _text(one.mfu, ".1%"),
    "pause for a checkpoint": lambda one: _text(one.pause_s, ".2f", " s"),
    "peak memory": lambda one: _text(one.peak_bytes and one.peak_bytes / 2**30, ".2f", " GiB"),
    "planned": lambda one: _text(one.planned_bytes and one.planned_bytes / 2**30, ".2f", " GiB"),
    "error of the plan": lambda one: _text(one.plan_error, "+.1%"),
    "took": lambda one: f"{one.seconds:.0f} s",
    "reason": lambda one: one.reason.replace("|", "\\|").replace("\n", "<br>"),
}


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def tables(measurements: Sequence[Measurement], machine: Mapping[str, str]) -> str:
    """A table for each title, without the columns that it has no figures for."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()) + "."]
    by_name = {one.step: one for one in measurements}
    for title in dict.fromkeys(title for title, _ in ROWS):
        steps = [step for other, steps in ROWS if other == title for step in steps]
        found = [by_name[step.name] for step in steps if step.name in by_name]
        rows = [{name: column(one) for name, column in COLUMNS.items()} for one in found]
        used = [name for name in COLUMNS if any(row[name] for row in rows)]
        if rows:
            lines += ["", f"**{title}**", "", f"| {' | '.join(used)} |", f"|{'---|' * len(used)}"]
            lines += [f"| {' | '.join(row[name] for name in used)} |" for row in rows]
    return "\n".join(lines)


def with_tables(page: str, measurements: Sequence[Measurement], machine: Mapping[str, str]) -> str:
    """The page with its tables brought up to date."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables(measurements, machine)}\n{END}{after}"


def archive(tar: Path, name: str, folders: Sequence[Path]) -> None:
    """Adds the files of a step's folder and of its run, without checkpoints, as long as there is room."""
    with tarfile.open(tar, "a") as file:
        for folder in folders:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                packed, size = path.suffix == ".gz", path.stat().st_size
                room = min(_TRACE if packed else _LOG, _MOST_BYTES - file.offset)
                unwanted = {run_folder.CHECKPOINTS, run_folder.TENSORBOARD} & set(path.parts)
                if unwanted or room <= 0 or (packed and size > room):
                    continue
                entry = tarfile.TarInfo(f"{name}/{path.relative_to(folder)}")
                with path.open("rb") as source:
                    source.seek(max(0, size - room))
                    content = source.read(room)
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))


def load(folder: Path) -> dict[str, Any]:
    """The results in a folder; of no step if there are none."""
    path = folder / RESULTS
    none: dict[str, Any] = {"rehearsal": None, "machine": {}, "steps": []}
    return json.loads(path.read_text()) if path.exists() else none


def store(folder: Path, results: Mapping[str, Any]) -> None:
    measurements = [Measurement(**one) for one in results["steps"]]
    run_folder.write_atomic(folder / RESULTS, (json.dumps(results, indent=2) + "\n").encode())
    run_folder.write_atomic(folder / REPORT, (tables(measurements, results["machine"]) + "\n").encode())


def publish(folders: Sequence[Path], page: Path) -> None:
    """Writes the results of trials to a page, of the steps that were run: the last folder's, if several have."""
    found: dict[str, Measurement] = {}
    machine: Mapping[str, str] = {}
    for folder in folders:
        if (results := load(folder))["rehearsal"] is not False:
            got = f"no {RESULTS} in it" if results["rehearsal"] is None else "the results of a rehearsal on the CPU"
            raise RequestError(Problem(str(folder), "has no results of a GPU", got, "give the --out of a trial"))
        for one in results["steps"]:
            if one["outcome"] != "not run":
                found[one["step"]] = Measurement(**one)
        machine = results["machine"]
    page.write_text(with_tables(page.read_text(), list(found.values()), machine))
