"""Reading a run's records: ``metrics.jsonl``, ``events.jsonl``, ``plan.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tridock import run_folder
from tridock.errors import Problem, RequestError

Record = dict[str, Any]


def check_run(folder: Path) -> None:
    """Raises :class:`RequestError` where ``folder`` is no run's."""
    if not (folder / run_folder.EXPERIMENT).is_file():
        got = f"no {run_folder.EXPERIMENT} in it" if folder.is_dir() else "no such folder"
        raise RequestError(Problem(str(folder), "is not a run's folder", got, "give runs/<run-id>"))


def read_lines(path: Path) -> list[Record]:
    """The objects of a JSON lines file; none where it is missing. A line that is still being written is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def read_metrics(folder: Path) -> tuple[list[Record], dict[str, list[Record]]]:
    """Logged iterations in order, and evaluations by split.

    A run that went back to a checkpoint in its own folder logs some iterations twice: the later record counts.
    """
    iterations: dict[int, Record] = {}
    evaluations: dict[str, dict[int, Record]] = {}
    for record in read_lines(folder / run_folder.METRICS):
        if "split" in record:
            evaluations.setdefault(record["split"], {})[record["iteration"]] = record
        else:
            iterations[record["iteration"]] = record
    return _in_order(iterations), {split: _in_order(records) for split, records in evaluations.items()}


def read_plan(folder: Path) -> Record:
    """``plan.json``, empty where the run has none."""
    try:
        plan: Record = json.loads((folder / run_folder.PLAN).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return plan


def _in_order(records: dict[int, Record]) -> list[Record]:
    return [records[iteration] for iteration in sorted(records)]
