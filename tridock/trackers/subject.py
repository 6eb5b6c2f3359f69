"""A run's metadata for trackers: name, settings, documents, and how it ended."""

import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.events import Event, events_of
from tridock.contracts.records import read_object, read_plan, records_in
from tridock.contracts.run_state import RunState, exit_code_of, state_of
from tridock.contracts.trackers import find_python

_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_REPORT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A run: its folder, and its settings as a tracker shows them."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The run's id, the same at every tracker and after every restart."""
        return self.folder.absolute().name

    def state(self) -> RunState:
        return state_of(self.folder)

    def exit_code(self) -> int:
        return exit_code_of(self.folder) or 0

    def documents(self) -> Iterator[Path]:
        names = (run_folder.EXPERIMENT, run_folder.PLAN, run_folder.MANIFEST, run_folder.EVENTS)
        yield from (self.folder / name for name in names if (self.folder / name).is_file())

    def summary(self) -> dict[str, float]:
        """Returns measured and planned memory in GiB per rank, the maximum over ranks."""
        stages = (read_plan(self.folder).get("memory") or {}).get("stages", ())
        ends = events_of(self.folder, Event.RUN_FINISHED)
        measured = [float(end["peak_memory_bytes"]) for end in ends if end.get("peak_memory_bytes")]
        records = records_in(self.folder / run_folder.METRICS)
        logged = deque((peaks for record in records if (peaks := record.get("memory_bytes"))), maxlen=1)
        measured += [float(max(peaks)) for peaks in logged if isinstance(peaks, list)]
        found = {"memory/planned_gib": [float(it["total_bytes"]) for it in stages], "memory/peak_gib": measured}
        return {name: max(sizes) / 2**30 for name, sizes in found.items() if sizes}


def of_run(folder: Path) -> Subject:
    """Reads a run's folder or a Megatron log's. Leaves out environment variables that look like secrets."""
    from tridock.strict_yaml import read_text
    from tridock.yaml_text import parse_yaml

    path = folder / run_folder.EXPERIMENT
    if not path.is_file():
        return Subject(folder, read_object(folder / run_folder.LOG_ARGUMENTS))
    experiment = dict(parse_yaml(read_text(path, "an experiment"), str(path)))
    env = experiment.get("env") or {}
    experiment["env"] = {name: value for name, value in env.items() if not _SECRET.search(name)}
    plan = read_plan(folder)
    shown = ("verdict", "world_size", "layout", "batch", "cost")
    config = {
        "experiment": experiment,
        "plan": {name: plan[name] for name in shown if name in plan},
        "manifest": read_object(folder / run_folder.MANIFEST),
    }
    return Subject(folder, config)


def write_report(folder: Path, into: Path) -> str | None:
    """Writes the run's report page to a file; returns the reason if it could not."""
    if (python := find_python("matplotlib")) is None:
        return "no Python here has matplotlib"
    argv = [python, "-P", "-m", "tridock.cli", "report", "--run", str(folder.absolute()), "-o", str(into)]
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_REPORT_S, cwd=empty, check=False)
        except subprocess.TimeoutExpired:
            return f"it took over {_REPORT_S:.0f} s"
    return None if done.returncode == 0 else done.stderr.strip()[-500:]


def say(text: str) -> None:
    print(text, flush=True, file=sys.stderr)
