"""Reading a run's records: ``metrics.jsonl``, ``events.jsonl``, ``plan.json``, ``manifest.json``."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError

Record = dict[str, Any]
Evaluations = dict[str, list[Record]]


def check_run(folder: Path) -> None:
    """Raises :class:`RequestError` where ``folder`` is no run's."""
    if not (folder / run_folder.EXPERIMENT).is_file():
        got = f"no {run_folder.EXPERIMENT} in it" if folder.is_dir() else "no such folder"
        raise RequestError(Problem(str(folder), "is not a run's folder", got, "give runs/<run-id>"))


def read_lines(path: Path, last_bytes: int | None = None) -> list[Record]:
    """The objects of a JSON lines file; none if it is missing. Skips a line that is still being written.

    ``last_bytes`` reads only the end of the file: a long run's metrics are long.
    """
    return list(_objects(path, last_bytes))


def read_metrics(folder: Path) -> tuple[list[Record], Evaluations]:
    """Logged iterations in order, and evaluations by split.

    A run that went back to a checkpoint in its own folder logs some iterations twice: the later record counts.
    """
    iterations: dict[int, Record] = {}
    evaluations: dict[str, dict[int, Record]] = {}
    for record in _objects(folder / run_folder.METRICS):
        if not isinstance(record.get("iteration"), int):
            continue
        if "split" in record:
            evaluations.setdefault(str(record["split"]), {})[record["iteration"]] = record
        else:
            iterations[record["iteration"]] = record
    return _in_order(iterations), {split: _in_order(records) for split, records in evaluations.items()}


def read_plan(folder: Path) -> Record:
    """``plan.json``, empty where the run has none."""
    return read_object(folder / run_folder.PLAN)


def read_object(path: Path) -> Record:
    """The object of a JSON file; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _objects(path: Path, last_bytes: int | None = None) -> Iterator[Record]:
    # Line by line: the metrics of a long run are long.
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _in_order(records: dict[int, Record]) -> list[Record]:
    return [records[iteration] for iteration in sorted(records)]
